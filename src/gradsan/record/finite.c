/* Search for NaN and Inf in plain memory, without an operator of torch.

A floating-point number is NaN or Inf if all bits of its exponent are set. Blocks are searched without a branch, so that
the compiler makes vector code of it. */

#include "finite.h"

#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096 };

#define DEFINE_SEARCH(NAME, TYPE, EXPONENT)                                                                           \
    static Py_ssize_t NAME(const char *memory, Py_ssize_t count)                                                      \
    {                                                                                                                 \
        for (Py_ssize_t start = 0; start < count; start += BLOCK) {                                                   \
            Py_ssize_t size = count - start < BLOCK ? count - start : BLOCK;                                          \
            const char *block = memory + start * (Py_ssize_t)sizeof(TYPE);                                            \
            TYPE found = 0;                                                                                           \
            for (Py_ssize_t i = 0; i < size; i++) {                                                                   \
                TYPE bits;                                                                                            \
                memcpy(&bits, block + i * (Py_ssize_t)sizeof(TYPE), sizeof(TYPE));                                    \
                found |= (TYPE)((bits & (TYPE)(EXPONENT)) == (TYPE)(EXPONENT));                                       \
            }                                                                                                         \
            if (!found)                                                                                               \
                continue;                                                                                             \
            for (Py_ssize_t i = 0; i < size; i++) {                                                                   \
                TYPE bits;                                                                                            \
                memcpy(&bits, block + i * (Py_ssize_t)sizeof(TYPE), sizeof(TYPE));                                    \
                if ((bits & (TYPE)(EXPONENT)) == (TYPE)(EXPONENT))                                                    \
                    return start + i;                                                                                 \
            }                                                                                                         \
        }                                                                                                             \
        return -1;                                                                                                    \
    }

DEFINE_SEARCH(search_float32, uint32_t, UINT32_C(0x7f800000))
DEFINE_SEARCH(search_float64, uint64_t, UINT64_C(0x7ff0000000000000))
DEFINE_SEARCH(search_float16, uint16_t, UINT16_C(0x7c00))
DEFINE_SEARCH(search_bfloat16, uint16_t, UINT16_C(0x7f80))

/* The index of the first of `count` numbers that is NaN or Inf, -1 if there is none. Kinds: 0 float32, 1 float64, 2
 * float16, 3 bfloat16. The memory must not change meanwhile. */
Py_ssize_t first_nonfinite_number(const char *memory, Py_ssize_t count, int kind)
{
    static Py_ssize_t (*const searches[])(const char *, Py_ssize_t) = {
        search_float32, search_float64, search_float16, search_bfloat16};
    return searches[kind](memory, count);
}

/* The Python function for it: (address, count, kind). */
PyObject *first_nonfinite(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "first_nonfinite takes an address, a count and a kind");
        return NULL;
    }
    const char *memory = PyLong_AsVoidPtr(args[0]);
    if (memory == NULL && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    long kind = PyLong_AsLong(args[2]);
    if (kind == -1 && PyErr_Occurred())
        return NULL;
    if (kind < 0 || kind > 3 || count < 0 || (memory == NULL && count > 0)) {
        PyErr_SetString(PyExc_ValueError, "first_nonfinite: no such memory, count or kind");
        return NULL;
    }
    return PyLong_FromSsize_t(count == 0 ? -1 : first_nonfinite_number(memory, count, (int)kind));
}
