"""Evidence → Diagnosis."""
from gradsan.model import *
def diagnose(evidence): return ()
