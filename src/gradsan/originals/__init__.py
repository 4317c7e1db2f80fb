"""Originals of saved tensors in deep and heal mode: kept, compared, and given to backward."""
