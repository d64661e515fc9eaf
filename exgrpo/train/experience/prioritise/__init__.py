"""How likely what is drawn: `prioritise(units, setting) -> Priority`, one function in each file."""
