"""Evidence for autograd's own errors other than the version check's."""
