/* Search for NaN and Inf in plain memory; see finite.c. */
#ifndef GRADSAN_FINITE_H
#define GRADSAN_FINITE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

Py_ssize_t first_nonfinite_number(const char *memory, Py_ssize_t count, int kind);
PyObject *first_nonfinite(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
