/* The recording core in C: _core_pure.py and _writer_pure.py, which are the specification.
 *
 * Only CPython's own C API is used (3.10 and newer), never a header or the ABI of torch: a tensor is read through the
 * descriptors that torch.Tensor shows to Python. Everything runs under the GIL; on a free-threaded build importing this
 * module brings the GIL back, which is CPython's default for a module that does not say otherwise.
 *
 * Two things are not of the public API. 3.11 and 3.12 make an object for every frame that somebody asks for, so there the
 * frames are read where the interpreter keeps them; where the header is not installed, the public way is taken. And until
 * 3.13 gradsan has the interpreter keep signals until its own code has run; without the header it does not.
 */
#define PY_SSIZE_T_CLEAN
#include <patchlevel.h>
#if PY_VERSION_HEX < 0x030E0000 && defined(__has_include)
#if __has_include("internal/pycore_runtime.h")
#define SIGNALS_CAN_WAIT 1
#ifndef Py_BUILD_CORE_MODULE
#define Py_BUILD_CORE_MODULE 1
#endif
#endif
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000 && defined(__has_include)
#if __has_include("internal/pycore_frame.h")
#define FRAMES_IN_PLACE 1
#ifndef Py_BUILD_CORE_MODULE
#define Py_BUILD_CORE_MODULE 1
#endif
#endif
#endif
#include <Python.h>
#ifdef FRAMES_IN_PLACE
#include "internal/pycore_frame.h"
#endif
#ifdef SIGNALS_CAN_WAIT
#include "internal/pycore_runtime.h"
#endif
#include <structmember.h>
#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "finite.h"
#include <string.h>

#define WRITES_KEPT 32768
#define NODES_KEPT 1048576
#define STACKS_KEPT 65536
#define DEPTH_KEPT 128
#define STEPS_KEPT 1024 /* beginnings and ends, each one */
#define BACKWARDS_KEPT 256

#include "native/torch.h"
#include "native/logs.h"
#include "native/own_code.h"
#include "native/core.h"
#include "native/writers.h"
#include "native/indexing.h"
#include "native/nonfinite.h"
#include "native/engine.h"
#include "native/lent.h"
#include "native/saved.h"
#include "native/heap.h"

/* ---- the type Core and the module ------------------------------------------------------------------------------- */

static PyObject *Core_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Core", names) || find_torch() < 0 || find_dtypes() < 0)
        return NULL;
    Core *self = (Core *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->optimizer_folder = PyObject_CallNoArgs(torch.optimizer_folder);
    self->running = PyList_New(0);
    self->open = PyDict_New();
    self->quiet_nodes = QUIET_NODES;
    self->settled = PySet_New(NULL);
    self->quiet_operators = PySet_New(NULL);
    if (self->optimizer_folder == NULL || self->running == NULL || self->open == NULL || self->settled == NULL ||
        self->quiet_operators == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int Core_traverse(Core *self, visitproc visit, void *arg)
{
    Py_VISIT(self->on_failure);
    Py_VISIT(self->on_enter);
    Py_VISIT(self->on_nonfinite);
    Py_VISIT(self->on_leave);
    Py_VISIT(self->on_result);
    Py_VISIT(self->on_nodes);
    Py_VISIT(self->on_quiet);
    Py_VISIT(self->on_write);
    Py_VISIT(self->before_write);
    Py_VISIT(self->lets_pass);
    Py_VISIT(self->on_round);
    Py_VISIT(self->on_differentiable);
    Py_VISIT(self->on_gradients);
    Py_VISIT(self->on_operator);
    Py_VISIT(self->on_step_begin);
    Py_VISIT(self->on_step_end);
    Py_VISIT(self->running);
    return 0;
}

static int Core_clear(Core *self)
{
    Py_CLEAR(self->on_failure);
    Py_CLEAR(self->on_enter);
    Py_CLEAR(self->on_nonfinite);
    Py_CLEAR(self->on_leave);
    Py_CLEAR(self->on_result);
    Py_CLEAR(self->on_nodes);
    Py_CLEAR(self->on_quiet);
    Py_CLEAR(self->on_write);
    Py_CLEAR(self->before_write);
    Py_CLEAR(self->lets_pass);
    Py_CLEAR(self->on_round);
    Py_CLEAR(self->on_differentiable);
    Py_CLEAR(self->on_gradients);
    Py_CLEAR(self->on_operator);
    Py_CLEAR(self->on_step_begin);
    Py_CLEAR(self->on_step_end);
    Py_CLEAR(self->running);
    return 0;
}

static void Core_dealloc(Core *self)
{
    PyObject_GC_UnTrack(self);
    Core_clear(self);
    Py_CLEAR(self->optimizer_folder);
    Py_CLEAR(self->open);
    Py_CLEAR(self->settled);
    Py_CLEAR(self->quiet_operators);
    Py_CLEAR(self->optimizer_code);
    forget_stacks(self);
    forget_logs(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Core_methods[] = {
    {"tick", (PyCFunction)Core_tick, METH_NOARGS,
     "tick($self, /)\n--\n\nAdvance the clock that orders all events and return its new value."},
    {"clear", (PyCFunction)Core_clear_logs, METH_NOARGS,
     "clear($self, /)\n--\n\nForget everything logged; the clock goes on."},
    {"stack", (PyCFunction)(void (*)(void))Core_stack, METH_FASTCALL | METH_KEYWORDS,
     "stack($self, skip=0)\n--\n\n"
     "Return the stack of the caller (skip frames further out); equal stacks are one object."},
    {"nodes_near", (PyCFunction)(void (*)(void))Core_nodes_near, METH_FASTCALL,
     "nodes_near($self, sequence, thread, /)\n--\n\n"
     "Return the call that made a Node, else the calls before and after it."},
    {"ran_since", (PyCFunction)(void (*)(void))Core_ran_since, METH_FASTCALL,
     "ran_since($self, stack, sequence, thread, /)\n--\n\nWhether the call at a stack has made Nodes again since."},
    {"writes", (PyCFunction)Core_writes, METH_NOARGS, "writes($self, /)\n--\n\nThe logged writes, oldest first."},
    {"writes_after", (PyCFunction)Core_writes_after, METH_O,
     "writes_after($self, clock, /)\n--\n\nReturn the logged writes that are younger than clock, oldest first."},
    {"lost_writes_after", (PyCFunction)Core_lost_writes_after, METH_O,
     "lost_writes_after($self, clock, /)\n--\n\nWhether the bounded log may have dropped a write younger than clock."},
    {"log_write", (PyCFunction)(void (*)(void))Core_log_write, METH_FASTCALL | METH_KEYWORDS,
     "log_write($self, tensor, op, kind, index, stack)\n--\n\nLog one in-place change of tensor."},
    {"writer", (PyCFunction)(void (*)(void))Core_writer, METH_FASTCALL | METH_KEYWORDS,
     "writer($self, original, op, kind, position, keyword)\n--\n\n"
     "Wrap original so that its writes are logged after it has returned."},
    {"listener", (PyCFunction)(void (*)(void))Core_listener, METH_FASTCALL | METH_KEYWORDS,
     "listener($self, original, before, after)\n--\n\n"
     "Wrap original so that before and after are called around it, without a frame in between."},
    {"relay", (PyCFunction)(void (*)(void))Core_relay, METH_FASTCALL | METH_KEYWORDS,
     "relay($self, original, before, after)\n--\n\n"
     "Wrap original so that before changes its arguments and after its result, without a frame in between."},
    {"watch_indexing", (PyCFunction)Core_watch_indexing, METH_O,
     "watch_indexing($self, wanted, /)\n--\n\nLog the Nodes that tensor[index] makes from now on, or no longer."},
    {"step_begin", (PyCFunction)(void (*)(void))Core_step_begin, METH_FASTCALL,
     "step_begin($self, optimizer, args, kwargs, /)\n--\n\nLog that a step begins: an optimizer's pre-hook."},
    {"step_end", (PyCFunction)(void (*)(void))Core_step_end, METH_FASTCALL,
     "step_end($self, optimizer, args, kwargs, /)\n--\n\nLog that a step has ended: an optimizer's post-hook."},
    {"engine", (PyCFunction)Core_engine, METH_O,
     "engine($self, original, /)\n--\n\nWrap the engine's entry point so that every backward call is known while it runs."},
    {NULL},
};

static PyMemberDef Core_members[] = {
    {"active", T_BOOL, offsetof(Core, active), 0, NULL},
    {"clock", T_LONGLONG, offsetof(Core, clock), 0, NULL},
    {"saves", T_LONGLONG, offsetof(Core, saves), 0, NULL},
    {"write_count", T_LONGLONG, offsetof(Core, write_count), 0, NULL},
    {"steps", T_LONGLONG, offsetof(Core, steps), 0, NULL},
    {"open_steps", T_LONGLONG, offsetof(Core, open_steps), 0, NULL},
    {"step_changes", T_LONGLONG, offsetof(Core, step_changes), 0, NULL},
    {"log_errors", T_LONGLONG, offsetof(Core, log_errors), 0, NULL},
    {"backwards", T_LONGLONG, offsetof(Core, backwards), 0, NULL},
    {"backward_end", T_LONGLONG, offsetof(Core, backward_end), 0, NULL},
    {"quiet_from", T_LONGLONG, offsetof(Core, quiet_from), 0, NULL},
    {"quiet_nodes", T_LONGLONG, offsetof(Core, quiet_nodes), 0, NULL},
    {"on_failure", T_OBJECT, offsetof(Core, on_failure), 0, NULL},
    {"on_enter", T_OBJECT, offsetof(Core, on_enter), 0, NULL},
    {"on_nonfinite", T_OBJECT, offsetof(Core, on_nonfinite), 0, NULL},
    {"on_leave", T_OBJECT, offsetof(Core, on_leave), 0, NULL},
    {"on_result", T_OBJECT, offsetof(Core, on_result), 0, NULL},
    {"on_nodes", T_OBJECT, offsetof(Core, on_nodes), 0, NULL},
    {"on_quiet", T_OBJECT, offsetof(Core, on_quiet), 0, NULL},
    {"on_write", T_OBJECT, offsetof(Core, on_write), 0, NULL},
    {"before_write", T_OBJECT, offsetof(Core, before_write), 0, NULL},
    {"tells_all_writes", T_BOOL, offsetof(Core, tells_all_writes), 0, NULL},
    {"lets_pass", T_OBJECT, offsetof(Core, lets_pass), 0, NULL},
    {"running", T_OBJECT_EX, offsetof(Core, running), READONLY, NULL},
    {"on_round", T_OBJECT, offsetof(Core, on_round), 0, NULL},
    {"on_differentiable", T_OBJECT, offsetof(Core, on_differentiable), 0, NULL},
    {"on_gradients", T_OBJECT, offsetof(Core, on_gradients), 0, NULL},
    {"on_operator", T_OBJECT, offsetof(Core, on_operator), 0, NULL},
    {"quiet_operators", T_OBJECT_EX, offsetof(Core, quiet_operators), READONLY, NULL},
    {"on_step_begin", T_OBJECT, offsetof(Core, on_step_begin), 0, NULL},
    {"on_step_end", T_OBJECT, offsetof(Core, on_step_end), 0, NULL},
    {"settled", T_OBJECT_EX, offsetof(Core, settled), READONLY, NULL},
    {"optimizer_folder", T_OBJECT, offsetof(Core, optimizer_folder), 0, NULL},
    {NULL},
};

static PyGetSetDef Core_getset[] = {
    {"step_log", (getter)Core_step_log, NULL, "The logged steps, oldest first.", NULL},
    {"backward_log", (getter)Core_backward_log, NULL, "The logged calls into the engine, oldest first.", NULL},
    {NULL},
};

static PyTypeObject Core_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.Core",
    .tp_doc = "Counters, logs and the functions that fill them. One per process.",
    .tp_basicsize = sizeof(Core),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Core_new,
    .tp_traverse = (traverseproc)Core_traverse,
    .tp_clear = (inquiry)Core_clear,
    .tp_dealloc = (destructor)Core_dealloc,
    .tp_methods = Core_methods,
    .tp_members = Core_members,
    .tp_getset = Core_getset,
};

static PyMethodDef functions[] = {
    {"call_alone", (PyCFunction)(void (*)(void))call_alone, METH_FASTCALL,
     "call_alone(function, /, *args)\n--\n\n"
     "Call function as the first one of a thread: its stack ends with its own frames."},
    {"call_own", (PyCFunction)(void (*)(void))call_own, METH_FASTCALL,
     "call_own(function, /, *args)\n--\n\nCall function as gradsan's own: none of the program's code runs in between."},
    {"first_nonfinite", (PyCFunction)(void (*)(void))first_nonfinite, METH_FASTCALL,
     "Return the index of the first NaN or Inf among numbers in memory (address, count, kind); -1 if there is none."},
    {"holds_nonfinite", (PyCFunction)holds_nonfinite, METH_O,
     "holds_nonfinite(tensor, /)\n--\n\nWhether a tensor holds NaN or Inf; None where its memory cannot show it."},
    {"lend", (PyCFunction)(void (*)(void))lend, METH_FASTCALL,
     "lend(address, shape, strides, code, bits, owner, /)\n--\n\n"
     "Return a DLPack capsule over memory that owner holds."},
    {"objects_of", (PyCFunction)objects_of, METH_O,
     "objects_of(kinds, /)\n--\n\nReturn the live objects of exactly these classes; the collector is paused by the caller."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "gradsan.record._native", .m_doc = "The recording core in C.", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&Stack_Type) < 0 || PyType_Ready(&MethodWriter_Type) < 0 || PyType_Ready(&FunctionWriter_Type) < 0 || PyType_Ready(&Engine_Type) < 0 || PyType_Ready(&Core_Type) < 0 ||
        PyType_Ready(&SavedFields_Type) < 0 || PyType_Ready(&SavedValues_Type) < 0 ||
        PyDict_SetItemString(Core_Type.tp_dict, "is_native", Py_True) < 0)
        return NULL;
    PyType_Modified(&Core_Type);
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Core", (PyObject *)&Core_Type) < 0 ||
        PyModule_AddObjectRef(module, "Stack", (PyObject *)&Stack_Type) < 0 ||
        PyModule_AddObjectRef(module, "SavedFields", (PyObject *)&SavedFields_Type) < 0 ||
        PyModule_AddObjectRef(module, "SavedValues", (PyObject *)&SavedValues_Type) < 0 ||
        PyModule_AddIntMacro(module, WRITES_KEPT) < 0 || PyModule_AddIntMacro(module, NODES_KEPT) < 0 ||
        PyModule_AddIntMacro(module, STACKS_KEPT) < 0 || PyModule_AddIntMacro(module, DEPTH_KEPT) < 0 ||
        PyModule_AddIntMacro(module, STEPS_KEPT) < 0 || PyModule_AddIntMacro(module, BACKWARDS_KEPT) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
