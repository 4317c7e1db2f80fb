"""Intent: signs in the source of what the program's author means by a write, a gradient, a flag or a condition."""
