"""What keeps a party's numbers to itself while they are added to everybody's."""
