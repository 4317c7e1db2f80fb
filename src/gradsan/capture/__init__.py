"""Run time: the only room that patches or hooks torch."""
