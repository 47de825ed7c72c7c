// Draws figures from their descriptions, which are plain objects (see figures.py). draw.py draws
// the same figures as files. Axes and small numbers of marks are SVG, so that they follow the
// page's colours. Large numbers of marks go onto a canvas beneath the SVG.
"use strict";

const charts = (() => {
  const HUES = 8; // in the palette; further series differ in dashes and hollow markers
  const MANY = 2000; // a canvas is faster for more marks than this
  const DASHES = ["", "7 4", "2 4", "9 4 2 4"];
  const FONT = 12;
  const LABEL = 132; // the longest label of a column of a heat map
  const SEQUENTIAL = [
    "#ffffd9",
    "#edf8b1",
    "#c7e9b4",
    "#7fcdbb",
    "#41b6c4",
    "#1d91c0",
    "#225ea8",
    "#253494",
    "#081d58",
  ]; // YlGnBu
  const STOPS = SEQUENTIAL.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const drawn = []; // every chart of the page

  // ---- how a series looks ----
  const LEVEL = "6 4"; // the dash of a level, a horizontal line that has no x

  /** Returns the look of a series. Parts of a whole have colours that no method has. */
  function look(index, palette = "") {
    const again = Math.floor(index / HUES);
    return {
      color: `var(--${palette === "parts" ? "p" : "s"}${index % HUES})`,
      dash: DASHES[again % DASHES.length],
      shape: (index + again) % 8,
      hollow: again % 2 === 1,
    };
  }

  const turn = (points, angle) =>
    points.map(([x, y]) => [
      x * Math.cos(angle) - y * Math.sin(angle),
      x * Math.sin(angle) + y * Math.cos(angle),
    ]);
  const PLUS = [
    [-0.35, -1],
    [0.35, -1],
    [0.35, -0.35],
    [1, -0.35],
    [1, 0.35],
    [0.35, 0.35],
    [0.35, 1],
    [-0.35, 1],
    [-0.35, 0.35],
    [-1, 0.35],
    [-1, -0.35],
    [-0.35, -0.35],
  ];
  const STAR = [...Array(10).keys()].map((k) => {
    const r = k % 2 ? 0.5 : 1.2,
      a = (k * Math.PI) / 5 - Math.PI / 2;
    return [r * Math.cos(a), r * Math.sin(a)];
  });
  const SHAPES = [
    null, // a circle
    [
      [-0.88, -0.88],
      [0.88, -0.88],
      [0.88, 0.88],
      [-0.88, 0.88],
    ],
    [
      [0, -1.15],
      [1.08, 0.8],
      [-1.08, 0.8],
    ],
    [
      [0, -1.25],
      [1.05, 0],
      [0, 1.25],
      [-1.05, 0],
    ],
    [
      [0, 1.15],
      [1.08, -0.8],
      [-1.08, -0.8],
    ],
    PLUS,
    turn(PLUS, Math.PI / 4),
    STAR,
  ];
  const short = (value) => Math.round(value * 10) / 10;

  function markerPath(shape, x, y, r) {
    const corners = SHAPES[shape];
    if (!corners)
      return `M${short(x - r)} ${short(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
    return `M${corners.map(([a, b]) => `${short(x + a * r)} ${short(y + b * r)}`).join("L")}Z`;
  }

  function swatch(style, form) {
    const parts = [],
      line = form === "lines" || form === "level";
    if (form === "bars") {
      parts.push(svg("path", { d: "M1 1h12v12h-12Z", style: `fill:${style.color}` }));
      if (style.dash)
        parts.push(
          svg("path", { d: hatching(1, 1, 12, 12), style: "stroke:var(--page);stroke-width:1.6" }),
        );
      return svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, ...parts);
    }
    if (line)
      parts.push(
        svg("path", {
          d: "M1 7H25",
          style: `stroke:${style.color};stroke-width:2;stroke-dasharray:${style.dash || "none"}`,
        }),
      );
    if (form === "level")
      return svg("svg", { width: 26, height: 14, "aria-hidden": "true" }, ...parts);
    const fill = style.hollow
      ? `fill:var(--page);stroke:${style.color};stroke-width:1.5`
      : `fill:${style.color}`;
    parts.push(svg("path", { d: markerPath(style.shape, line ? 13 : 7, 7, 4), style: fill }));
    return svg("svg", { width: line ? 26 : 14, height: 14, "aria-hidden": "true" }, ...parts);
  }

  /** Returns the colour [r, g, b] of a share from 0 to 1. Large shares contrast with the page. */
  function shade(share, dark) {
    const at = Math.max(0, Math.min(1, dark ? 1 - share : share)) * (STOPS.length - 1);
    const k = Math.min(Math.floor(at), STOPS.length - 2),
      rest = at - k;
    return STOPS[k].map((from, c) => Math.round(from + (STOPS[k + 1][c] - from) * rest));
  }
  const css = (rgb) => `rgb(${rgb.join(",")})`;
  /** Returns black or white, whichever has the higher contrast to a colour. */
  function inkOn(rgb) {
    const [r, g, b] = rgb
      .map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }

  // ---- measuring text and colours ----
  const measure = document.createElement("canvas").getContext("2d");
  function textWidth(text, size = FONT) {
    measure.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    return measure.measureText(text).width;
  }
  function shortened(text, room, size = FONT) {
    if (textWidth(text, size) <= room) return text;
    let cut = text;
    while (cut.length > 1 && textWidth(`${cut}…`, size) > room) cut = cut.slice(0, -1);
    return `${cut}…`;
  }
  /** Returns the current value of a colour of the style sheet: a canvas has no CSS variables. */
  function resolved(box, color) {
    const probe = el("i", { hidden: true });
    probe.style.color = color;
    box.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  // ---- scales and ticks ----
  function makeScale([from, to], [left, right], log) {
    const f = log ? Math.log10 : (v) => v;
    const a = f(from),
      b = f(to);
    const at = (value) =>
      b === a ? (left + right) / 2 : left + ((f(value) - a) / (b - a)) * (right - left);
    return Object.assign(at, {
      from,
      to,
      log,
      holds: (value) => known(value) && (!log || value > 0),
    });
  }

  /** Returns a logarithmic scale with a place for 0 at `zeroAt`: local training sends 0 bytes. */
  function withZero(scale, zeroAt) {
    const at = (value) => (value === 0 ? zeroAt : scale(value));
    return Object.assign(at, scale, { holds: (value) => value === 0 || scale.holds(value) });
  }

  /** Returns the smallest and the largest value, with a margin. The default is [0, 1]. */
  function domain(values, axis, zero = false) {
    let low = Infinity,
      high = -Infinity;
    for (const value of values) {
      if (!known(value) || (axis.log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (axis.from !== undefined) low = Math.max(low, axis.from); // lower values are not shown
    if (low > high) return axis.log ? [1, 10] : [0, 1];
    if (zero) return [Math.min(0, low), high > 0 ? high * 1.02 : 1];
    if (axis.log) {
      // At least a factor of 10, so that small differences look small.
      const more = Math.max((high / low) ** 0.04, Math.sqrt((10 * low) / high));
      return [low / more, high * more];
    }
    const room =
      low === high
        ? Math.abs(low) * 0.1 || (axis.unit === "percent" ? 0.05 : 1)
        : (high - low) * 0.05;
    // Bytes start at 0, so that small differences look small.
    const least = axis.unit === "bytes" ? 0 : Math.max(0, low - room);
    const bottom = low >= 0 ? least : low - room;
    return [bottom, axis.unit === "percent" && high <= 1 ? Math.min(1, high + room) : high + room];
  }

  function ticks(scale, axis, room) {
    const most = Math.max(2, room);
    if (scale.log) {
      const first = Math.floor(Math.log10(scale.from)),
        last = Math.ceil(Math.log10(scale.to));
      const inside = (steps, every = 1) => {
        const found = [];
        for (let e = first; e <= last; e += every)
          for (const step of steps) found.push(step * 10 ** e);
        return found.filter((value) => value >= scale.from && value <= scale.to);
      };
      const fine = inside([1, 2, 5]);
      const values =
        fine.length <= Math.max(most, 3) + 1
          ? fine
          : inside([1], Math.max(1, Math.ceil((last - first) / most)));
      if (values.length > 1) return values.map((value) => ({ value, text: tickText(value, axis) }));
    }
    let [factor, unit] = unitFor(axis.unit, Math.max(Math.abs(scale.from), Math.abs(scale.to)));
    const from = scale.from / factor,
      to = scale.to / factor;
    const rough = (to - from) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].find((m) => m * power >= rough * 0.999) * power;
    if (axis.unit === "count") step = Math.max(1, Math.round(step));
    const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    const found = [];
    for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) {
      const number = k * step || 0; // never -0
      const text = decimals ? number.toFixed(decimals) : whole.format(number);
      found.push({
        value: number * factor,
        text: number === 0 ? "0" : withUnit(text, unit),
      });
    }
    return found;
  }

  function tickText(value, axis) {
    if (axis.unit === "percent") return withUnit(plain.format(value * 100), "%");
    if (axis.unit !== "bytes" && axis.unit !== "seconds")
      return value >= 1e6 || value < 1e-3
        ? value.toExponential(0).replace("e+", "e")
        : plain.format(value);
    const [factor, unit] = unitFor(axis.unit, value * 1.0000001);
    return withUnit(plain.format(value / factor), unit);
  }

  // ---- marks: one interface for SVG and canvas ----
  function makeInk(chart, width, height, heavy) {
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      "aria-hidden": "true",
    });
    const back = svg("g"),
      marks = svg("g"),
      front = svg("g");
    root.append(back, marks, front);
    const ink = { root, back, front, width, height };
    let context = null;
    if (heavy) {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const fine = Math.min(window.devicePixelRatio || 1, 2);
      canvas.width = Math.round(width * fine);
      canvas.height = Math.round(height * fine);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      context = canvas.getContext("2d");
      context.scale(fine, fine);
      // The grid stays beneath the marks.
      const under = svg("svg", { width, height, class: "under", "aria-hidden": "true" }, back);
      chart.box.replaceChildren(under, canvas, root, chart.tip);
    } else chart.box.replaceChildren(root, chart.tip);
    const colors = new Map();
    const color = (name) => {
      if (!colors.has(name)) colors.set(name, resolved(chart.box, name));
      return colors.get(name);
    };
    ink.context = context;
    ink.color = color;
    ink.path = (
      d,
      { fill = "none", stroke = "none", width: thick = 1, dash = "", opacity = 1 },
    ) => {
      if (!d) return;
      if (!context) {
        const dashes = dash || "none";
        const line = `stroke:${stroke};stroke-width:${thick};stroke-dasharray:${dashes}`;
        const style = `fill:${fill};${line};opacity:${opacity}`;
        marks.append(
          svg("path", {
            d,
            style,
            "stroke-linejoin": "round",
            "stroke-linecap": dash ? "butt" : "round",
          }),
        );
        return;
      }
      context.globalAlpha = opacity;
      context.setLineDash(dash ? dash.split(" ").map(Number) : []);
      context.lineJoin = context.lineCap = "round";
      const shape = new Path2D(d);
      if (fill !== "none") {
        context.fillStyle = color(fill);
        context.fill(shape);
      }
      if (stroke !== "none") {
        context.strokeStyle = color(stroke);
        context.lineWidth = thick;
        context.stroke(shape);
      }
      context.globalAlpha = 1;
    };
    /** Draws markers of one style. A canvas draws each separately: dense regions are darker. */
    ink.markers = (points, style, r, opacity = 1) => {
      const paint = style.hollow
        ? { fill: "var(--page)", stroke: style.color, width: 1.5 }
        : { fill: style.color, stroke: "var(--page)", width: 0.75 };
      if (!context)
        ink.path(points.map(([x, y]) => markerPath(style.shape, x, y, r)).join(""), {
          ...paint,
          opacity,
        });
      else {
        const shape = new Path2D(markerPath(style.shape, 0, 0, r));
        context.setLineDash([]);
        context.globalAlpha = opacity;
        context.fillStyle = context.strokeStyle = color(style.color);
        context.lineWidth = 1.2;
        for (const [x, y] of points) {
          context.translate(x, y);
          if (style.hollow) context.stroke(shape);
          else context.fill(shape);
          context.translate(-x, -y);
        }
        context.globalAlpha = 1;
      }
    };
    ink.label = (text, x, y, more = {}) => {
      const { group = back, full = "", ...attributes } = more;
      const node = svg("text", { x: short(x), y: short(y), ...attributes }, text);
      if (full && full !== text) node.append(svg("title", {}, full));
      group.append(node);
      return node;
    };
    ink.line = (x1, y1, x2, y2, name, group = back) =>
      group.append(
        svg("path", { d: `M${short(x1)} ${short(y1)}L${short(x2)} ${short(y2)}`, class: name }),
      );
    return ink;
  }

  // ---- a frame with two axes ----
  /** With `equal` both axes have the same range and the same length. */
  function frame(chart, width, xs, ys, heavy, equal = false) {
    const { x, y } = chart.spec;
    const narrow = width < 480;
    const tall = Math.round(
      equal || chart.spec.tall ? Math.min(width, 560) : Math.max(250, Math.min(width * 0.58, 420)),
    );
    const yDomain = domain(equal ? [...xs, ...ys] : ys, y);
    const top = y.label ? 26 : 12,
      bottom = tall - (x.label ? 44 : 26);
    const whole = makeScale(yDomain, [bottom, top], y.log);
    const yScale =
      y.from === undefined
        ? whole
        : Object.assign(whole, { holds: (value) => known(value) && value >= y.from });
    const yTicks = ticks(yScale, y, Math.floor((bottom - top) / 38));
    const left = Math.ceil(Math.max(20, ...yTicks.map((t) => textWidth(t.text)))) + 10,
      right = equal ? Math.min(width - 14, left + bottom - top) : width - 14;
    const zeroAt = x.log && xs.some((value) => value === 0),
      begin = zeroAt ? left + 44 : left;
    const positive = makeScale(equal ? yDomain : domain(xs, x), [begin, right], x.log),
      xScale = zeroAt ? withZero(positive, left + 14) : positive;
    const xTicks = ticks(
      xScale,
      x,
      Math.floor(
        (right - begin) / (x.unit === "count" || x.unit === "percent" ? 56 : narrow ? 74 : 84),
      ),
    );
    if (zeroAt) xTicks.unshift({ value: 0, text: "0" });
    const ink = makeInk(chart, width, tall, heavy);
    for (const tick of yTicks) {
      ink.line(left, yScale(tick.value), right, yScale(tick.value), "grid");
      ink.label(tick.text, left - 8, yScale(tick.value) + 4, { "text-anchor": "end" });
    }
    ink.line(begin, bottom, right, bottom, "axis");
    // 0 has a separate piece of the axis: a logarithmic axis has no 0.
    if (zeroAt) ink.line(left, bottom, left + 28, bottom, "axis");
    let free = -Infinity;
    for (const tick of xTicks) {
      const at = xScale(tick.value),
        half = textWidth(tick.text) / 2;
      ink.line(at, bottom, at, bottom + 4, "axis");
      if (at - half < free + 6) continue; // no room for the text
      const middle = Math.min(at, width - half);
      ink.label(tick.text, middle, bottom + 18, { "text-anchor": "middle" });
      free = middle + half;
    }
    if (y.label) ink.label(shortened(y.label, width), 0, 11, { class: "name", full: y.label });
    if (x.label)
      ink.label(shortened(x.label, right - left), (left + right) / 2, tall - 5, {
        class: "name",
        "text-anchor": "middle",
        full: x.label,
      });
    return { ink, x: xScale, y: yScale, left, right, top, bottom };
  }

  const placed = (f, series) =>
    series.x.map((x, k) =>
      f.x.holds(x) && f.y.holds(series.y[k]) ? [f.x(x), f.y(series.y[k])] : null,
    );

  function polyline(points) {
    let d = "",
      pen = false;
    points.forEach((p, k) => {
      // A point between two gaps becomes a dot.
      if (p)
        d += `${pen ? "L" : "M"}${short(p[0])} ${short(p[1])}${!pen && !points[k + 1] ? "h0" : ""}`;
      pen = Boolean(p);
    });
    return d;
  }

  function band(f, series) {
    if (!series.low || !series.high) return "";
    let d = "",
      upper = [],
      lower = [];
    const close = () => {
      const outline = [...upper, ...lower.reverse()];
      if (upper.length > 1)
        d += `M${outline.map((p) => `${short(p[0])} ${short(p[1])}`).join("L")}Z`;
      upper = [];
      lower = [];
    };
    series.x.forEach((x, k) => {
      const low = series.low[k],
        high = series.high[k];
      if (!f.x.holds(x) || !f.y.holds(low) || !f.y.holds(high)) return close();
      upper.push([f.x(x), f.y(high)]);
      lower.push([f.x(x), f.y(low)]);
    });
    close();
    return d;
  }

  const pile = (series, ...keys) => keys.flatMap((key) => series.flatMap((one) => one[key] ?? []));
  const range = (low, high, unit) =>
    known(low) && known(high) && low !== high
      ? ` (${written(low, unit)} to ${written(high, unit)})`
      : "";

  // ---- the kinds: each draws, and returns the values for the pointer and the arrow keys ----
  const kinds = {
    lines(chart, width) {
      const { spec } = chart,
        series = chart.visible(spec.series);
      const f = frame(chart, width, pile(series, "x"), pile(series, "y", "low", "high"), false);
      const spots = series.map((one) => placed(f, one));
      if (spec.zero && f.y.from < 0 && f.y.to > 0)
        f.ink.line(f.left, f.y(0), f.right, f.y(0), "diagonal");
      series.forEach((one) =>
        f.ink.path(band(f, one), { fill: look(one.color, spec.palette).color, opacity: 0.16 }),
      );
      series.forEach((one, s) => {
        const style = look(one.color, spec.palette);
        f.ink.path(polyline(spots[s]), { stroke: style.color, width: 2, dash: style.dash });
        const there = spots[s].filter(Boolean),
          every = Math.max(1, Math.ceil(there.length / 8));
        f.ink.markers(
          there.filter((_, k) => there.length <= 12 || k % every === (s * 2) % every),
          style,
          there.length === 1 ? 5 : 3.6,
        );
      });
      const places = [...new Set(series.flatMap((one) => one.x.filter(f.x.holds)))].sort(
        (a, b) => a - b,
      );
      const at = (k) => {
        const x = places[k];
        if (x === undefined) return null;
        const rows = series
          .map((one) => {
            const n = one.x.indexOf(x);
            return (
              n >= 0 &&
              known(one.y[n]) && {
                style: look(one.color, spec.palette),
                name: one.name,
                sort: one.y[n],
                y: f.y(one.y[n]),
                text:
                  written(one.y[n], spec.y.unit) +
                  (one.low && one.high ? range(one.low[n], one.high[n], spec.y.unit) : ""),
              }
            );
          })
          .filter(Boolean)
          .sort((a, b) => b.sort - a.sort);
        return {
          x: f.x(x),
          y: rows[0]?.y ?? f.top,
          rule: [f.top, f.bottom],
          dots: rows.map((row) => [f.x(x), row.y]),
          title: `${spec.x.label} ${written(x, spec.x.unit)}`,
          rows,
        };
      };
      const nearest = (px) => {
        let best = 0;
        places.forEach((x, k) => {
          if (Math.abs(f.x(x) - px) < Math.abs(f.x(places[best]) - px)) best = k;
        });
        return best;
      };
      return {
        count: places.length,
        at,
        find: (px, py) => (px >= f.left - 12 && py <= f.bottom + 30 ? nearest(px) : -1),
      };
    },

    points(chart, width) {
      const { spec } = chart,
        series = chart.visible(spec.series),
        frontier = spec.frontier ?? [],
        levels = chart.visible(spec.levels ?? []);
      const count = series.reduce((sum, one) => sum + one.x.length, 0),
        heavy = count > MANY;
      const xs = [...pile(series, "x"), ...frontier.map(([x]) => x)],
        ys = [
          ...pile(series, "y", "low", "high"),
          ...frontier.map(([, y]) => y),
          ...levels.map((one) => one.y),
        ];
      const f = frame(chart, width, xs, ys, heavy, spec.diagonal);
      if (spec.diagonal)
        f.ink.line(
          f.left,
          f.bottom,
          f.right,
          f.top,
          "diagonal",
          heavy ? f.ink.front : f.ink.back,
        );
      const steps = frontier
        .filter(([x, y]) => f.x.holds(x) && f.y.holds(y))
        .map(([x, y]) => [f.x(x), f.y(y)]);
      if (steps.length)
        f.ink.back.append(
          svg("path", {
            class: "frontier",
            d: `M${short(steps[0][0])} ${short(steps[0][1])}${steps
              .slice(1)
              .map(([x, y]) => `H${short(x)}V${short(y)}`)
              .join("")}H${short(f.right)}`,
          }),
        );
      for (const one of levels)
        if (f.y.holds(one.y))
          f.ink.path(`M${short(f.left)} ${short(f.y(one.y))}H${short(f.right)}`, {
            stroke: look(one.color).color,
            width: 1.6,
            dash: LEVEL,
          });
      const found = [];
      series.forEach((one) => {
        const style = look(one.color),
          spots = placed(f, one);
        let whiskers = "";
        spots.forEach((spot, k) => {
          if (!spot) return;
          found.push({ spot, one, k });
          const low = one.low?.[k],
            high = one.high?.[k];
          if (f.y.holds(low) && f.y.holds(high)) {
            const x = short(spot[0]);
            const from = short(f.y(low)),
              to = short(f.y(high));
            whiskers += `M${x} ${from}V${to}M${x - 3} ${from}h6M${x - 3} ${to}h6`;
          }
        });
        f.ink.path(whiskers, { stroke: style.color, width: 1.3 });
        f.ink.markers(
          spots.filter(Boolean),
          style,
          heavy ? 2.2 : count > 400 ? 2.8 : count > 60 ? 3.8 : 5,
          heavy ? 0.4 : count > 400 ? 0.55 : 0.95,
        );
      });
      const at = (n) => {
        const hit = found[n];
        if (!hit) return null;
        const { spot, one, k } = hit;
        return {
          x: spot[0],
          y: spot[1],
          dots: [spot],
          title: one.labels?.[k] ? `${one.name}, ${one.labels[k]}` : one.name,
          rows: [
            { name: spec.x.label || "x", text: written(one.x[k], spec.x.unit) },
            {
              name: spec.y.label || "y",
              text:
                written(one.y[k], spec.y.unit) +
                (one.low && one.high ? range(one.low[k], one.high[k], spec.y.unit) : ""),
            },
          ],
        };
      };
      return { count: found.length, at, find: nearestOf(found.map((hit) => hit.spot)) };
    },

    bars(chart, width) {
      const { spec } = chart,
        series = chart.visible(spec.series);
      const totals = spec.rows.map((_, r) =>
        series.reduce((sum, one) => sum + (known(one.values[r]) ? one.values[r] : 0), 0),
      );
      const longest = Math.max(...spec.rows.map((name) => textWidth(name, 13)), 10);
      const above = width < 520 && longest > width * 0.25; // no room for names beside their bars
      const words = totals.map((total) => written(total, spec.x.unit));
      const left = above
        ? 0
        : Math.ceil(Math.min(width * 0.34, longest)) + 12;
      const right = width - Math.ceil(Math.max(...words.map((word) => textWidth(word)), 10)) - 12;
      const pitch = above ? 44 : 34,
        top = 4,
        bottom = top + pitch * spec.rows.length,
        tall = bottom + (spec.x.label ? 44 : 26);
      const axis = { ...spec.x, log: false }; // stacked lengths need a linear axis
      const x = makeScale(domain(totals, axis, true), [left, right], false);
      const ink = makeInk(chart, width, tall, false);
      for (const tick of ticks(x, axis, Math.floor((right - left) / 84))) {
        ink.line(x(tick.value), top, x(tick.value), bottom, "grid");
        ink.label(tick.text, x(tick.value), bottom + 18, {
          "text-anchor": tick.value === 0 && above ? "start" : "middle",
        });
      }
      if (spec.x.label)
        ink.label(shortened(spec.x.label, right - left), (left + right) / 2, tall - 5, {
          class: "name",
          "text-anchor": "middle",
        });
      const segments = [];
      spec.rows.forEach((name, r) => {
        const y = top + r * pitch + (above ? 19 : 7),
          thick = 20;
        if (above) ink.label(shortened(name, width, 13), 0, y - 6, { class: "row", full: name });
        else
          ink.label(shortened(name, left - 12, 13), left - 12, y + 15, {
            class: "row",
            "text-anchor": "end",
            full: name,
          });
        let sum = 0;
        for (const one of series) {
          const value = one.values[r];
          if (!known(value) || value <= 0) continue;
          const from = x(sum),
            to = x(sum + value),
            style = look(one.color, spec.palette);
          sum += value;
          const wide = Math.max(to - from - (to - from > 3 ? 1 : 0), 0.8);
          ink.path(`M${short(from)} ${y}h${short(wide)}v${thick}h${short(-wide)}Z`, {
            fill: style.color,
          });
          if (style.dash)
            ink.path(hatching(from, y, wide, thick), { stroke: "var(--page)", width: 1.6 });
          segments.push({
            r,
            one,
            value,
            spot: [(from + to) / 2, y + thick / 2],
            from,
            to,
            y,
            thick,
          });
        }
        ink.label(words[r], x(sum) + 6, y + 14);
        if (above) ink.line(left, y - 2, left, y + thick + 2, "axis", ink.front);
      });
      if (!above) ink.line(left, top, left, bottom, "axis", ink.front);
      const at = (k) => {
        const hit = segments[k];
        if (!hit) return null;
        const share = totals[hit.r] ? ` (${written(hit.value / totals[hit.r], "percent")})` : "";
        return {
          x: hit.spot[0],
          y: hit.spot[1],
          dots: [hit.spot],
          title: spec.rows[hit.r],
          rows: [
            {
              style: look(hit.one.color, spec.palette),
              name: hit.one.name,
              text: written(hit.value, spec.x.unit) + share,
            },
            { name: "total", text: words[hit.r] },
          ],
        };
      };
      return {
        count: segments.length,
        at,
        find: (px, py) =>
          segments.findIndex(
            (s) => py >= s.y - 7 && py <= s.y + s.thick + 7 && px >= s.from - 2 && px <= s.to + 2,
          ),
      };
    },

    heat(chart, width) {
      const { spec } = chart,
        rows = spec.rows.length,
        columns = spec.columns.length,
        dark = theme.isDark();
      const heavy = rows * columns > MANY;
      const left =
          Math.ceil(
            Math.min(width * 0.3, Math.max(...spec.rows.map((name) => textWidth(name)), 8)),
          ) + 8,
        right = width - 2;
      const cellW = (right - left) / Math.max(columns, 1);
      // A confusion matrix has about square cells.
      const cellH = spec.counts
        ? Math.max(14, Math.min(cellW, 44, 560 / rows))
        : rows <= 30
          ? Math.max(20, Math.min(26, 200 / rows))
          : Math.max(0.9, Math.min(20, 900 / rows));
      const longest = Math.max(...spec.columns.map((name) => textWidth(name)), 8),
        slant = longest + 4 > cellW;
      const top = spec.row_label ? 20 : 4,
        bottom = top + rows * cellH,
        foot = (slant ? Math.min(longest, LABEL) * 0.72 + 18 : 22) + (spec.column_label ? 18 : 0);
      const tall = Math.ceil(bottom + foot),
        high = spec.high > spec.low ? spec.high : spec.low + 1;
      const ink = makeInk(chart, width, tall, heavy);
      const show = (value) =>
        !known(value)
          ? "absent"
          : spec.unit
            ? written(value, spec.unit)
            : spec.format === "0.00"
              ? value.toFixed(2)
              : whole.format(value);
      const brief = (value) =>
        spec.unit === "percent"
          ? (value * 100).toFixed(0)
          : spec.format === "0.00"
            ? value.toFixed(2)
            : cellW < 44 && value >= 10000
              ? `${whole.format(value / 1000)}k`
              : whole.format(value);
      const counted = (r, c) =>
        spec.counts
          ? ` (${whole.format(spec.counts[r][c])} of ` +
            `${whole.format(spec.counts[r].reduce((sum, count) => sum + count, 0))})`
          : "";
      const gapX = cellW > 8 ? 1 : 0,
        gapY = cellH > 6 ? 1 : 0,
        fits = cellW >= 28 && cellH >= 14 && !heavy;
      for (let r = 0; r < rows; r++)
        for (let c = 0; c < columns; c++) {
          const value = spec.values[r][c],
            rgb = known(value) ? shade((value - spec.low) / (high - spec.low), dark) : null;
          const x = left + c * cellW,
            y = top + r * cellH;
          if (heavy) {
            ink.context.fillStyle = rgb ? css(rgb) : ink.color("var(--absent)");
            const y0 = Math.round(y * 2) / 2;
            ink.context.fillRect(
              x,
              y0,
              cellW - gapX,
              Math.max(0.5, Math.round((y + cellH) * 2) / 2 - y0 - gapY),
            );
            continue;
          }
          ink.path(
            `M${short(x)} ${short(y)}h${short(cellW - gapX)}v${short(cellH - gapY)}` +
              `h${short(gapX - cellW)}Z`,
            { fill: rgb ? css(rgb) : "var(--absent)" },
          );
          if (fits && rgb && textWidth(brief(value), 11) < cellW - 4)
            ink.label(brief(value), x + cellW / 2, y + cellH / 2 + 4, {
              group: ink.front,
              "text-anchor": "middle",
              class: "cell",
              style: `fill:${inkOn(rgb)}`,
            });
        }
      const everyRow =
          [1, 2, 5, 10, 20, 50, 100].find((step) => step * cellH >= 14) ?? Math.ceil(14 / cellH),
        everyColumn = Math.max(1, Math.ceil((slant ? 16 : 1) / cellW));
      for (let r = 0; r < rows; r += everyRow)
        ink.label(shortened(spec.rows[r], left - 8), left - 6, top + (r + 0.5) * cellH + 4, {
          "text-anchor": "end",
          full: spec.rows[r],
        });
      for (let c = 0; c < columns; c += everyColumn) {
        const x = left + (c + 0.5) * cellW,
          y = bottom + 15;
        if (slant)
          ink.label(shortened(spec.columns[c], LABEL), x + 4, y - 3, {
            "text-anchor": "end",
            transform: `rotate(-45 ${short(x + 4)} ${short(y - 3)})`,
            full: spec.columns[c],
          });
        else ink.label(spec.columns[c], x, y, { "text-anchor": "middle" });
      }
      if (spec.row_label) ink.label(spec.row_label, 0, 11, { class: "name" });
      if (spec.column_label)
        ink.label(spec.column_label, (left + right) / 2, tall - 4, {
          class: "name",
          "text-anchor": "middle",
        });
      const missing = spec.values.some((row) => row.some((value) => !known(value)));
      const ramp = [0, 0.25, 0.5, 0.75, 1].map((share) => css(shade(share, dark))).join(",");
      const percent = spec.unit === "percent" ? "\u202f%" : "";
      const strip = el("span", { class: "ramp" });
      strip.style.background = `linear-gradient(90deg,${ramp})`;
      const scale = el(
        "span",
        { class: "scale" },
        brief(spec.low) + percent,
        strip,
        brief(high) + percent,
      );
      chart.legend.replaceChildren(
        ...(missing
          ? [scale, el("span", { class: "scale" }, el("span", { class: "ramp absent" }), "absent")]
          : [scale]),
      );
      const at = (k) => {
        const r = Math.floor(k / columns),
          c = k % columns;
        if (k < 0 || r >= rows) return null;
        const x = left + c * cellW,
          y = top + r * cellH;
        const row = `${spec.row_label || "row"} ${spec.rows[r]}`,
          column = `${spec.column_label || "column"} ${spec.columns[c]}`;
        return {
          x: x + cellW / 2,
          y: y + cellH / 2,
          outline: [x, y, cellW - gapX, cellH - gapY],
          title: `${row}, ${column}`,
          rows: [{ name: "", text: show(spec.values[r][c]) + counted(r, c) }],
        };
      };
      return {
        count: rows * columns,
        across: columns,
        at,
        find: (px, py) =>
          px < left || px >= right || py < top || py >= bottom
            ? -1
            : Math.min(rows - 1, Math.floor((py - top) / cellH)) * columns +
              Math.min(columns - 1, Math.floor((px - left) / cellW)),
      };
    },

    image(chart, width) {
      const { spec } = chart,
        dark = theme.isDark();
      const grid = panelGrid(
          chart,
          width,
          560,
          spec.row_label ? 18 : 0,
          spec.column_label ? 18 : 0,
        ),
        ink = makeInk(chart, width, grid.height, true);
      const bytes = spec.panels.map((panel) =>
        Uint8Array.from(atob(panel.values), (c) => c.charCodeAt(0)),
      );
      spec.panels.forEach((panel, p) => {
        const { x, y } = grid.place(p),
          n = panel.size,
          buffer = document.createElement("canvas");
        buffer.width = buffer.height = n;
        const pixels = new ImageData(n, n);
        for (let k = 0; k < n * n; k++)
          if (bytes[p][k])
            pixels.data.set([...shade(0.18 + (0.82 * bytes[p][k]) / 255, dark), 255], 4 * k);
        buffer.getContext("2d").putImageData(pixels, 0, 0);
        ink.context.imageSmoothingEnabled = n > grid.side * 2;
        ink.context.drawImage(buffer, x, y, grid.side, grid.side);
        for (const tick of spec.ticks ?? [])
          if (tick > 0 && tick < 1) {
            ink.line(x + tick * grid.side, y, x + tick * grid.side, y + grid.side, "division");
            ink.line(x, y + tick * grid.side, x + grid.side, y + tick * grid.side, "division");
          }
        ink.front.append(
          svg("rect", { x, y, width: grid.side, height: grid.side, class: "border" }),
        );
        ink.label(shortened(panel.title, grid.side, 13), x, y - 8 - grid.above, {
          class: "row",
          full: panel.title,
        });
        if (spec.row_label) ink.label(`${spec.row_label} ↓`, x, y - 7, { class: "name" });
        if (spec.column_label)
          ink.label(`${spec.column_label} →`, x + grid.side, y + grid.side + 15, {
            class: "name",
            "text-anchor": "end",
          });
      });
      const block = (share) =>
        spec.ticks?.length
          ? spec.ticks.filter((tick) => tick <= share).length - (spec.ticks[0] > 0 ? 0 : 1)
          : null;
      const at = (k) => {
        let p = 0;
        while (p < spec.panels.length && k >= spec.panels[p].size ** 2)
          k -= spec.panels[p++].size ** 2;
        if (p >= spec.panels.length) return null;
        const n = spec.panels[p].size,
          r = Math.floor(k / n),
          c = k % n,
          cell = grid.side / n,
          { x, y } = grid.place(p);
        const name = (label, number) =>
          block((number + 0.5) / n) === null
            ? `${label} ${number + 1} of ${n}`
            : `${label}: client ${block((number + 0.5) / n)}`;
        return {
          x: x + (c + 0.5) * cell,
          y: y + (r + 0.5) * cell,
          outline: [x + c * cell, y + r * cell, cell, cell],
          title: spec.panels[p].title,
          rows: [
            { name: name(spec.row_label || "row", r), text: "" },
            { name: name(spec.column_label || "column", c), text: "" },
            { name: "of the maximum", text: written(bytes[p][k] / 255, "percent") },
          ],
        };
      };
      const find = (px, py) => {
        let before = 0;
        for (let p = 0; p < spec.panels.length; p++) {
          const { x, y } = grid.place(p),
            n = spec.panels[p].size,
            c = Math.floor(((px - x) / grid.side) * n),
            r = Math.floor(((py - y) / grid.side) * n);
          if (c >= 0 && c < n && r >= 0 && r < n) return before + r * n + c;
          before += n * n;
        }
        return -1;
      };
      return {
        count: spec.panels.reduce((sum, panel) => sum + panel.size ** 2, 0),
        across: spec.panels[0]?.size,
        at,
        find,
      };
    },

    graph(chart, width) {
      return cloud(chart, width, (ink, panel, spot) => {
        const place = (i) => spot(i).map(short).join(" ");
        const join = (pairs) => pairs.map(([i, j]) => `M${place(i)}L${place(j)}`).join("");
        ink.path(join(panel.edges), {
          stroke: "var(--edge)",
          width: 0.9,
          opacity: panel.edges.length > MANY ? 0.35 : 0.7,
        });
        if (panel.added)
          ink.path(join(panel.added), {
            stroke: "var(--added)",
            width: 1.5,
            dash: "5 3",
            opacity: panel.added.length > MANY ? 0.35 : 0.9,
          });
      });
    },

    scatter: (chart, width) => cloud(chart, width, () => {}),
  };

  const hatching = (x, y, wide, thick) => {
    let d = "";
    for (let at = 5; at < wide + thick; at += 7) {
      const from = Math.max(0, at - thick),
        to = Math.min(at, wide);
      if (to > from)
        d += `M${short(x + from)} ${short(y + at - from)}L${short(x + to)} ${short(y + at - to)}`;
    }
    return d;
  };

  function nearestOf(spots, reach = 28) {
    return (px, py) => {
      let best = -1,
        least = reach * reach;
      spots.forEach(([x, y], k) => {
        const distance = (x - px) ** 2 + (y - py) ** 2;
        if (distance < least) {
          least = distance;
          best = k;
        }
      });
      return best;
    };
  }

  /** Returns the places of square panels: in one row as long as they are large enough. */
  function panelGrid(chart, width, largest, above = 0, below = 0) {
    const count = chart.spec.panels.length,
      gap = 24,
      head = 26 + above,
      foot = 8 + below;
    const across = Math.max(1, Math.min(count, Math.floor((width + gap) / (250 + gap))));
    const side = Math.floor(Math.min(largest, (width - gap * (across - 1)) / across));
    const lines = Math.ceil(count / across);
    return {
      side,
      above,
      height: lines * (head + side + foot),
      place: (p) => ({
        x: (p % across) * (side + gap),
        y: head + Math.floor(p / across) * (head + side + foot),
      }),
    };
  }

  /** Draws graphs and embeddings: points in panels, coloured by class or by client. */
  function cloud(chart, width, under) {
    const { spec } = chart,
      grid = panelGrid(chart, width, 560);
    const marks = spec.panels.reduce(
      (sum, panel) =>
        sum + panel.points.length + (panel.edges?.length ?? 0) + (panel.added?.length ?? 0),
      0,
    );
    const ink = makeInk(chart, width, grid.height, marks > MANY),
      found = [];
    spec.panels.forEach((panel, p) => {
      const { x, y } = grid.place(p),
        edge = 10;
      const spot = (k) => [
        x + edge + panel.points[k][0] * (grid.side - 2 * edge),
        y + edge + (1 - panel.points[k][1]) * (grid.side - 2 * edge),
      ];
      ink.front.append(svg("rect", { x, y, width: grid.side, height: grid.side, class: "border" }));
      ink.label(shortened(panel.title, grid.side, 13), x, y - 8, {
        class: "row",
        full: panel.title,
      });
      under(ink, panel, spot);
      const groups = new Map();
      panel.points.forEach((_, k) => {
        const group = chart.groupOf(panel, k);
        if (chart.hidden.has(chart.groupName(group))) return;
        if (!groups.has(group)) groups.set(group, []);
        groups.get(group).push(spot(k));
        found.push({ spot: spot(k), panel, k });
      });
      const r = panel.points.length > 3000 ? 2 : panel.points.length > 600 ? 2.6 : 3.8;
      for (const [group, spots] of [...groups].sort(([a], [b]) => a - b))
        ink.markers(spots, look(Math.max(group, 0)), r, panel.points.length > 600 ? 0.7 : 0.95);
    });
    const at = (n) => {
      const hit = found[n];
      if (!hit) return null;
      const { panel, k, spot } = hit,
        rows = [];
      if (panel.classes)
        rows.push({
          name: "class",
          text: spec.class_names?.[panel.classes[k]] ?? String(panel.classes[k]),
        });
      if (panel.clients) rows.push({ name: "client", text: String(panel.clients[k]) });
      if (panel.edges)
        rows.push({
          name: "edges",
          text: String(
            [...panel.edges, ...(panel.added ?? [])].filter(([i, j]) => i === k || j === k).length,
          ),
        });
      return { x: spot[0], y: spot[1], dots: [spot], title: `${panel.title}: ${k}`, rows };
    };
    return {
      count: found.length,
      at,
      find: nearestOf(
        found.map((hit) => hit.spot),
        16,
      ),
    };
  }

  // ---- the numbers, as a table ----
  function numbers(spec) {
    const left = (name) => ({ name, align: "left" }),
      right = (name) => ({ name, align: "right" });
    const cell = (value, unit) => ({
      text: written(value, unit),
      sort: known(value) ? value : null,
    });
    if (spec.kind === "lines" || spec.kind === "points") {
      const spread = spec.series.some((one) => one.low && one.high),
        labels = spec.series.some((one) => one.labels);
      const columns = [
        left("series"),
        ...(labels ? [left("label")] : []),
        right(spec.x.label || "x"),
        right(spec.y.label || "y"),
        ...(spread ? [right("low"), right("high")] : []),
      ];
      const rows = spec.series.flatMap((one) =>
        one.x.map((x, k) => [
          one.name,
          ...(labels ? [one.labels?.[k] ?? ""] : []),
          cell(x, spec.x.unit),
          cell(one.y[k], spec.y.unit),
          ...(spread ? [cell(one.low?.[k], spec.y.unit), cell(one.high?.[k], spec.y.unit)] : []),
        ]),
      );
      const unknown = spread ? [cell(null), cell(null)] : [];
      for (const one of spec.levels ?? [])
        rows.push([
          one.name,
          ...(labels ? ["level"] : []),
          cell(null),
          cell(one.y, spec.y.unit),
          ...unknown,
        ]);
      return { columns, rows };
    }
    if (spec.kind === "bars")
      return {
        columns: [left(""), ...spec.series.map((one) => right(one.name))],
        rows: spec.rows.map((name, r) => [
          name,
          ...spec.series.map((one) => cell(one.values[r], spec.x.unit)),
        ]),
      };
    if (spec.kind === "heat") {
      const text = (value, r, c) => {
        const { text: shown, sort } = cell(value, spec.unit);
        return { text: spec.counts ? `${spec.counts[r][c]} (${shown})` : shown, sort };
      };
      return {
        columns: [left(spec.row_label || ""), ...spec.columns.map(right)],
        rows: spec.rows.map((name, r) => [
          name,
          ...spec.values[r].map((value, c) => text(value, r, c)),
        ]),
      };
    }
    if (spec.kind === "image") {
      const rows = spec.panels.flatMap((panel) => {
        const bytes = atob(panel.values),
          n = panel.size,
          found = [];
        for (let k = 0; k < n * n; k++)
          if (bytes.charCodeAt(k))
            found.push([panel.title, Math.floor(k / n) + 1, (k % n) + 1, bytes.charCodeAt(k)]);
        return found;
      });
      return {
        columns: [
          left("panel"),
          right(spec.row_label || "row"),
          right(spec.column_label || "column"),
          right("of 255"),
        ],
        rows,
      };
    }
    const rows = spec.panels.flatMap((panel) =>
      panel.points.map(([x, y], k) => [
        panel.title,
        k,
        cell(x),
        cell(y),
        panel.classes ? (spec.class_names?.[panel.classes[k]] ?? panel.classes[k]) : "",
        panel.clients ? panel.clients[k] : "",
      ]),
    );
    return {
      columns: [
        left("panel"),
        right("point"),
        right("x"),
        right("y"),
        left("class"),
        right("client"),
      ],
      rows,
    };
  }

  // ---- one figure ----
  /**
   * Returns the element of a figure. Its title is a heading of the given level.
   *
   * `chart.update(spec)` replaces its description. `chart.draw()` draws it if it is visible.
   */
  function figure(spec, heading = "h3") {
    const box = el("div", { class: "plot", tabindex: "0", role: "img" });
    const tip = el("div", { class: "tip", role: "status", hidden: true }),
      legend = el("div", { class: "legend" });
    const head = el(heading),
      caption = el("p"),
      more = el("details", { class: "data" }, el("summary", {}, "Data"));
    const element = el(
      "figure",
      { id: spec.id, class: spec.kind },
      el("figcaption", {}, head, caption),
      el("div", { class: "body" }, box, legend, more),
    );
    const chart = {
      spec,
      element,
      box,
      tip,
      legend,
      hidden: new Set(),
      by: "classes",
      width: 0,
      found: null,
      at: -1,
    };
    chart.visible = (series) => series.filter((one) => !chart.hidden.has(one.name));
    chart.groupOf = (panel, k) => (panel[chart.by] ?? panel.classes)?.[k] ?? 0;
    chart.groupName = (group) =>
      chart.by === "clients"
        ? `client ${chart.spec.client_names?.[group] ?? group}`
        : (chart.spec.class_names?.[group] ?? `class ${group}`);

    chart.draw = () => {
      const width = Math.floor(box.clientWidth);
      if (!width) return; // in a hidden tab: drawn when the tab opens
      chart.width = width;
      hideTip();
      chart.found = kinds[chart.spec.kind](chart, width);
    };
    chart.update = (fresh) => {
      chart.spec = fresh;
      head.textContent = fresh.title;
      caption.textContent = fresh.caption;
      caption.hidden = !fresh.caption;
      box.setAttribute(
        "aria-label",
        `${fresh.title}. ${fresh.caption} Arrow keys select values. Data shows them as a table.`,
      );
      makeLegend();
      if (more.open) fillData();
      const shown = chart.at;
      chart.draw();
      if (shown >= 0) showTip(shown); // an open tooltip stays open
    };

    function makeLegend() {
      const { kind, series, panels } = chart.spec;
      if (kind === "heat" || kind === "image") return legend.replaceChildren();
      let entries;
      if (kind === "bars" && series.length === 1)
        entries = []; // the axis names it
      else if (series)
        entries = [
          ...series.map((one) => ({
            name: one.name,
            style: look(one.color, chart.spec.palette),
            form: kind,
          })),
          ...(chart.spec.levels ?? []).map((one) => ({
            name: one.name,
            style: { ...look(one.color), dash: LEVEL },
            form: "level",
          })),
        ];
      else {
        const groups = [
          ...new Set(
            panels.flatMap((panel) => panel.points.map((_, k) => chart.groupOf(panel, k))),
          ),
        ].sort((a, b) => a - b);
        entries =
          groups.length > 1
            ? groups.map((group) => ({
                name: chart.groupName(group),
                style: look(Math.max(group, 0)),
                form: kind,
              }))
            : [];
      }
      const items = entries.map(({ name, style, form }) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(!chart.hidden.has(name)),
            title: "show or hide",
            onclick: (event) => {
              if (!chart.hidden.delete(name)) chart.hidden.add(name);
              event.currentTarget.setAttribute("aria-pressed", String(!chart.hidden.has(name)));
              chart.draw();
            },
          },
          swatch(style, form),
          name,
        ),
      );
      if (kind === "points" && chart.spec.frontier?.length)
        items.push(
          el(
            "span",
            { class: "key" },
            svg(
              "svg",
              { width: 26, height: 14, "aria-hidden": "true" },
              svg("path", { class: "frontier", d: "M1 11H9V5H25" }),
            ),
            "frontier",
          ),
        );
      if (kind === "points" && chart.spec.diagonal)
        items.push(
          el(
            "span",
            { class: "key" },
            svg(
              "svg",
              { width: 26, height: 14, "aria-hidden": "true" },
              svg("path", { class: "diagonal", d: "M5 13L21 1" }),
            ),
            "equal",
          ),
        );
      if (kind === "graph" && panels.some((panel) => panel.added?.length))
        items.push(
          el(
            "span",
            { class: "key" },
            svg(
              "svg",
              { width: 26, height: 14, "aria-hidden": "true" },
              svg("path", { class: "added", d: "M1 7H25" }),
            ),
            "added edge",
          ),
        );
      const clients = new Set((panels ?? []).flatMap((panel) => panel.clients ?? []));
      if (
        panels &&
        clients.size > 1 &&
        clients.size <= 24 &&
        panels.some((panel) => panel.classes)
      ) {
        const other = chart.by === "classes" ? "clients" : "classes";
        items.unshift(
          el(
            "button",
            {
              type: "button",
              class: "switch",
              onclick: () => {
                chart.by = other;
                chart.hidden.clear();
                makeLegend();
                chart.draw();
                legend.querySelector(".switch").focus();
              },
            },
            `Colour by ${other === "clients" ? "client" : "class"}`,
          ),
        );
      }
      legend.replaceChildren(...items);
    }

    function fillData() {
      const table = more.querySelector(".table"),
        { columns, rows } = numbers(chart.spec);
      if (table) table.fill(rows);
      else more.append(makeTable({ title: chart.spec.title, columns, rows }));
    }
    more.addEventListener("toggle", () => more.open && !more.querySelector(".table") && fillData());

    function hideTip() {
      tip.hidden = true;
      chart.at = -1;
      box.querySelector(".hover")?.remove();
    }
    function showTip(k) {
      const hit = k >= 0 ? chart.found?.at(k) : null;
      if (!hit) return hideTip();
      chart.at = k;
      box.querySelector(".hover")?.remove();
      const hover = svg("g", { class: "hover" });
      if (hit.rule)
        hover.append(svg("path", { d: `M${short(hit.x)} ${hit.rule[0]}V${hit.rule[1]}` }));
      for (const [x, y] of hit.dots ?? []) hover.append(svg("circle", { cx: x, cy: y, r: 6 }));
      if (hit.outline)
        hover.append(
          svg("rect", {
            x: hit.outline[0],
            y: hit.outline[1],
            width: Math.max(hit.outline[2], 3),
            height: Math.max(hit.outline[3], 3),
          }),
        );
      box.querySelector("svg:not(.under)").append(hover);
      const rows = hit.rows
        .slice(0, 14)
        .map((row) =>
          el(
            "tr",
            {},
            el(
              "td",
              {},
              row.style ? swatch(row.style, chart.spec.kind === "bars" ? "bars" : "") : "",
            ),
            el("td", {}, row.name),
            el("td", { class: "right" }, row.text),
          ),
        );
      if (hit.rows.length > 14)
        rows.push(
          el("tr", {}, el("td"), el("td", {}, `and ${hit.rows.length - 14} more`), el("td")),
        );
      tip.replaceChildren(
        el("strong", {}, hit.title),
        el("table", { role: "presentation" }, ...rows),
      );
      tip.hidden = false;
      const { offsetWidth: wide, offsetHeight: high } = tip;
      const left = hit.x + 14 + wide <= chart.width ? hit.x + 14 : Math.max(0, hit.x - 14 - wide);
      tip.style.left = `${Math.min(left, Math.max(0, chart.width - wide))}px`;
      tip.style.top = `${Math.max(-20, Math.min(hit.y - high / 2, box.clientHeight - high))}px`;
    }
    const follow = (event) => {
      const place = box.getBoundingClientRect();
      showTip(
        chart.found ? chart.found.find(event.clientX - place.left, event.clientY - place.top) : -1,
      );
    };
    box.addEventListener("pointermove", follow);
    box.addEventListener("pointerdown", follow);
    box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTip());
    box.addEventListener("blur", hideTip);
    box.addEventListener("keydown", (event) => {
      const last = (chart.found?.count ?? 0) - 1,
        down = chart.found?.across ?? 1;
      const step = {
        ArrowLeft: -1,
        ArrowRight: 1,
        ArrowUp: -down,
        ArrowDown: down,
        Home: -Infinity,
        End: Infinity,
      }[event.key];
      if (event.key === "Escape") return hideTip();
      if (step === undefined || last < 0) return;
      event.preventDefault();
      showTip(
        chart.at < 0
          ? step === Infinity
            ? last
            : 0
          : Math.max(0, Math.min(last, chart.at + step)),
      );
    });
    new ResizeObserver(() => Math.floor(box.clientWidth) !== chart.width && chart.draw()).observe(
      box,
    );
    drawn.push(chart);
    chart.update(spec);
    element.chart = chart;
    return element;
  }

  theme.listeners.push(() => drawn.forEach((chart) => chart.draw()));
  return { figure, drawAll: () => drawn.forEach((chart) => chart.draw()) };
})();
