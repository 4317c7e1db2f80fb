/* The recording core in C: _core_pure.py and _writer_pure.py, which are the specification.
 *
 * Only CPython's own C API is used (3.10 and newer), never a header or the ABI of torch: a tensor is read through the
 * descriptors that torch.Tensor shows to Python. Everything runs under the GIL; on a free-threaded build importing this
 * module brings the GIL back, which is CPython's default for a module that does not say otherwise.
 *
 * One thing is not of the public API: 3.11 and 3.12 make an object for every frame that somebody asks for, so there the
 * frames are read where the interpreter keeps them. Where the header is not installed, the public way is taken.
 */
#define PY_SSIZE_T_CLEAN
#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000 && defined(__has_include)
#if __has_include("internal/pycore_frame.h")
#define FRAMES_IN_PLACE 1
#define Py_BUILD_CORE_MODULE 1
#endif
#endif
#include <Python.h>
#ifdef FRAMES_IN_PLACE
#include "internal/pycore_frame.h"
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

/* ---- torch, as Python shows it ---------------------------------------------------------------------------------- */

enum { VERSION, IS_LEAF, REQUIRES_GRAD, SHAPE, ATTRIBUTES };
enum { UNTYPED_STORAGE, STORAGE_OFFSET, STRIDE, ELEMENT_SIZE, METHODS };

static const char *const attribute_texts[ATTRIBUTES] = {"_version", "is_leaf", "requires_grad", "shape"};
static const char *const method_texts[METHODS] = {"untyped_storage", "storage_offset", "stride", "element_size"};

/* Filled by the first Core and kept for the life of the process. */
static struct {
    int ready;
    PyTypeObject *tensor, *parameter; /* types whose members may be read by descriptor; parameter NULL: it overrides */
    PyTypeObject *storage;
    PyObject *attribute_names[ATTRIBUTES], *method_names[METHODS], *cdata_name;
    PyGetSetDef *attributes[ATTRIBUTES], *cdata; /* NULL: not the kind of descriptor expected, go by attribute */
    PyObject *methods[METHODS];                  /* NULL: as above */
    PyObject *sequence_number, *is_grad_enabled, *weak_identity, *dress, *optimizer_folder, *reduction;
    PyObject *has_function_modes, *hush, *unhush;
} torch;

/* The C getter behind `type.name`, NULL without an exception where there is none. The type keeps the descriptor alive. */
static PyGetSetDef *getter_of(PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    PyGetSetDef *getter = NULL;
    if (found == NULL)
        PyErr_Clear();
    else if (Py_IS_TYPE(found, &PyGetSetDescr_Type) && PyType_IsSubtype(type, ((PyDescrObject *)found)->d_type))
        getter = ((PyGetSetDescrObject *)found)->d_getset;
    Py_XDECREF(found);
    return getter != NULL && getter->get != NULL ? getter : NULL;
}

static PyObject *method_of(PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found == NULL)
        PyErr_Clear();
    else if (!Py_IS_TYPE(found, &PyMethodDescr_Type))
        Py_CLEAR(found);
    return found;
}

static PyObject *attribute_of_module(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return found;
}

static PyTypeObject *type_of_module(const char *module_name, const char *name)
{
    PyObject *found = attribute_of_module(module_name, name);
    if (found != NULL && !PyType_Check(found)) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not a class", module_name, name);
        Py_CLEAR(found);
    }
    return (PyTypeObject *)found;
}

static PyTypeObject MethodWriter_Type, FunctionWriter_Type;

/* Makes `__call__`, read from the types of the wrappers, the function that a compiler can trace; calls go on to take
 * tp_call. torch.compile looks it up where it meets an object that is called, and a slot of C would break its graph. */
static int let_compilers_trace(void)
{
    PyObject *call = attribute_of_module("gradsan.record._writer_pure", "traced_call");
    PyTypeObject *types[] = {&MethodWriter_Type, &FunctionWriter_Type};
    int status = call == NULL ? -1 : 0;
    for (int i = 0; status == 0 && i < 2; i++) {
        status = PyDict_SetItemString(types[i]->tp_dict, "__call__", call);
        PyType_Modified(types[i]);
    }
    Py_XDECREF(call);
    return status;
}

static int find_torch(void)
{
    static const char here[] = "gradsan._torch";
    if (torch.ready)
        return 0;
    if ((torch.tensor = type_of_module("torch", "Tensor")) == NULL ||
        (torch.parameter = type_of_module("torch.nn", "Parameter")) == NULL ||
        (torch.storage = type_of_module("torch", "UntypedStorage")) == NULL ||
        (torch.sequence_number = attribute_of_module(here, "sequence_number")) == NULL ||
        (torch.is_grad_enabled = attribute_of_module(here, "is_grad_enabled")) == NULL ||
        (torch.weak_identity = attribute_of_module(here, "weak_identity")) == NULL ||
        (torch.dress = attribute_of_module(here, "dress")) == NULL ||
        (torch.optimizer_folder = attribute_of_module(here, "optimizer_folder")) == NULL ||
        (torch.reduction = attribute_of_module("gradsan.record._writer_pure", "reduction")) == NULL ||
        (torch.has_function_modes = attribute_of_module(here, "has_function_modes")) == NULL ||
        (torch.hush = attribute_of_module(here, "hush")) == NULL ||
        (torch.unhush = attribute_of_module(here, "unhush")) == NULL ||
        (torch.cdata_name = PyUnicode_InternFromString("_cdata")) == NULL || let_compilers_trace() < 0)
        return -1;
    for (int i = 0; i < ATTRIBUTES; i++) {
        if ((torch.attribute_names[i] = PyUnicode_InternFromString(attribute_texts[i])) == NULL)
            return -1;
        torch.attributes[i] = getter_of(torch.tensor, torch.attribute_names[i]);
        if (getter_of(torch.parameter, torch.attribute_names[i]) != torch.attributes[i])
            torch.parameter = torch.tensor;
    }
    for (int i = 0; i < METHODS; i++) {
        if ((torch.method_names[i] = PyUnicode_InternFromString(method_texts[i])) == NULL)
            return -1;
        torch.methods[i] = method_of(torch.tensor, torch.method_names[i]);
        PyObject *overriding = method_of(torch.parameter, torch.method_names[i]);
        if (overriding != torch.methods[i])
            torch.parameter = torch.tensor;
        Py_XDECREF(overriding);
    }
    torch.cdata = getter_of(torch.storage, torch.cdata_name);
    torch.ready = 1;
    return 0;
}

/* Whether the type is known to override nothing, so that its members may be read by descriptor. */
static inline int is_plain(PyObject *tensor)
{
    return Py_IS_TYPE(tensor, torch.tensor) || Py_IS_TYPE(tensor, torch.parameter);
}

static inline PyObject *attribute(PyObject *tensor, int which)
{
    PyGetSetDef *getter = torch.attributes[which];
    if (getter != NULL && is_plain(tensor))
        return getter->get(tensor, getter->closure);
    return PyObject_GetAttr(tensor, torch.attribute_names[which]);
}

static inline PyObject *method(PyObject *tensor, int which)
{
    PyObject *descriptor = torch.methods[which];
    if (descriptor != NULL && is_plain(tensor))
        return PyObject_Vectorcall(descriptor, &tensor, 1, NULL);
    return PyObject_CallMethodNoArgs(tensor, torch.method_names[which]);
}

/* The truth of a value that is given away; -1 with an exception, also where the value is NULL. */
static inline int truth(PyObject *given)
{
    if (given == NULL)
        return -1;
    int found = given == Py_True ? 1 : given == Py_False ? 0 : PyObject_IsTrue(given);
    Py_DECREF(given);
    return found;
}

/* The integer of a value that is given away; -1 with an exception, also where the value is NULL. */
static inline long long integer(PyObject *given)
{
    if (given == NULL)
        return -1;
    long long found = PyLong_AsLongLong(given);
    Py_DECREF(given);
    return found;
}

/* Lets what is read of tensors pass by the program's own __torch_function__, of modes and of subclasses. What is given
 * goes to `unhush`; NULL where nobody listens. `tensor` may be NULL: then only modes count. Raises nothing. */
static PyObject *hush(PyObject *tensor)
{
    int listens = tensor != NULL && !is_plain(tensor);
    if (!listens)
        listens = truth(PyObject_Vectorcall(torch.has_function_modes, NULL, 0, NULL));
    PyObject *before = listens > 0 ? PyObject_Vectorcall(torch.hush, NULL, 0, NULL) : NULL;
    if (before == NULL && listens != 0)
        PyErr_Clear();
    return before;
}

/* Takes what `hush` gave; an exception that is set stays. */
static void unhush(PyObject *before)
{
    if (before == NULL)
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallOneArg(torch.unhush, before);
    if (done == NULL)
        PyErr_Clear();
    Py_XDECREF(done);
    Py_DECREF(before);
    PyErr_Restore(type, value, traceback);
}

static PyObject *storage_identity(PyObject *tensor)
{
    PyObject *storage = method(tensor, UNTYPED_STORAGE);
    if (storage == NULL)
        return NULL;
    PyObject *found = torch.cdata != NULL && Py_IS_TYPE(storage, torch.storage)
                          ? torch.cdata->get(storage, torch.cdata->closure)
                          : PyObject_GetAttr(storage, torch.cdata_name);
    Py_DECREF(storage);
    return found;
}

static int is_tensor(PyObject *object)
{
    return PyObject_TypeCheck(object, torch.tensor) ? 1 : PyObject_IsInstance(object, (PyObject *)torch.tensor);
}

/* ---- Stack ------------------------------------------------------------------------------------------------------ */

/* Innermost frame first. Behind `codes` (one strong reference each) lie as many ints, the f_lasti of each frame. */
typedef struct {
    PyObject_VAR_HEAD
    uint64_t hash;
    long long rounds; /* how many backward calls were made here */
    PyObject *codes[1];
} Stack;

static PyTypeObject Stack_Type;

static inline int *lastis_of(Stack *stack)
{
    return (int *)(stack->codes + Py_SIZE(stack));
}

static inline uint64_t mixed(uint64_t hash, const void *code, int lasti)
{
    hash = (hash + ((uintptr_t)code >> 4) + ((uint64_t)(uint32_t)lasti << 36)) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 29;
}

static Stack *new_stack(PyObject *const *codes, const int *lastis, Py_ssize_t depth, uint64_t hash)
{
    Stack *stack = PyObject_NewVar(Stack, &Stack_Type, depth);
    if (stack == NULL)
        return NULL;
    stack->hash = hash;
    stack->rounds = 0;
    memcpy(stack->codes, codes, depth * sizeof *codes);
    memcpy(lastis_of(stack), lastis, depth * sizeof *lastis);
    for (Py_ssize_t i = 0; i < depth; i++)
        Py_INCREF(codes[i]);
    return stack;
}

static PyObject *Stack_new(PyTypeObject *Py_UNUSED(type), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"codes", "lastis", NULL};
    PyObject *codes, *lastis;
    int numbers[DEPTH_KEPT];
    uint64_t hash = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:Stack", names, &PyTuple_Type, &codes, &PyTuple_Type, &lastis))
        return NULL;
    Py_ssize_t depth = PyTuple_GET_SIZE(codes);
    if (depth != PyTuple_GET_SIZE(lastis) || depth > DEPTH_KEPT) {
        PyErr_Format(PyExc_ValueError, "codes and lastis must be of one length, at most %d", DEPTH_KEPT);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < depth; i++) {
        if ((numbers[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(lastis, i))) == -1 && PyErr_Occurred())
            return NULL;
        hash = mixed(hash, PyTuple_GET_ITEM(codes, i), numbers[i]);
    }
    return (PyObject *)new_stack(PySequence_Fast_ITEMS(codes), numbers, depth, hash);
}

static void Stack_dealloc(Stack *self)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++)
        Py_DECREF(self->codes[i]);
    PyObject_Free(self);
}

static PyObject *Stack_codes(Stack *self, void *Py_UNUSED(closure))
{
    PyObject *found = PyTuple_New(Py_SIZE(self));
    for (Py_ssize_t i = 0; found != NULL && i < Py_SIZE(self); i++)
        PyTuple_SET_ITEM(found, i, Py_NewRef(self->codes[i]));
    return found;
}

static PyObject *Stack_lastis(Stack *self, void *Py_UNUSED(closure))
{
    PyObject *found = PyTuple_New(Py_SIZE(self));
    for (Py_ssize_t i = 0; found != NULL && i < Py_SIZE(self); i++) {
        PyObject *lasti = PyLong_FromLong(lastis_of(self)[i]);
        if (lasti == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, lasti);
    }
    return found;
}

static PyGetSetDef Stack_getset[] = {
    {"codes", (getter)Stack_codes, NULL, "The code objects, innermost frame first.", NULL},
    {"lastis", (getter)Stack_lastis, NULL, "For each code object, f_lasti at the moment of capture.", NULL},
    {NULL},
};

static PyTypeObject Stack_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.Stack",
    .tp_doc = "A raw stack, innermost frame first: code objects and instruction offsets, no frame.",
    .tp_basicsize = offsetof(Stack, codes),
    .tp_itemsize = sizeof(PyObject *) + sizeof(int),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Stack_new,
    .tp_dealloc = (destructor)Stack_dealloc,
    .tp_getset = Stack_getset,
};

/* ---- bounded logs ----------------------------------------------------------------------------------------------- */

typedef struct {
    char *items;
    size_t capacity, first, count; /* capacity is 0 or a power of two */
} Ring;

/* The place for one more item. Where the ring is full, the oldest item is moved to `dropped` and its place is given;
 * otherwise `dropped` is filled with zeros. NULL with an exception where memory is short. */
static inline void *ring_push(Ring *ring, size_t size, size_t most, void *dropped)
{
    memset(dropped, 0, size);
    if (ring->count == ring->capacity) {
        if (ring->capacity == most) {
            char *place = ring->items + ring->first * size;
            memcpy(dropped, place, size);
            ring->first = (ring->first + 1) & (most - 1);
            return place;
        }
        /* A ring that has not reached its bound has never wrapped: its first item is at 0. */
        size_t wider = ring->capacity ? ring->capacity * 2 : 256;
        char *items = PyMem_Realloc(ring->items, wider * size);
        if (items == NULL)
            return PyErr_NoMemory();
        ring->items = items;
        ring->capacity = wider;
    }
    return ring->items + ring->count++ * size;
}

/* Nodes with the sequence numbers first <= n < end, made in one thread by one call. */
typedef struct {
    long long first, end, clock;
    unsigned long thread;
    PyObject *stack;
} LoggedNodes;

/* A list of numbers that needs no memory of its own while it is short. */
typedef struct {
    int count, capacity;
    long long *many, few[8]; /* many: NULL while they are few */
} Numbers;

static void start_numbers(Numbers *numbers)
{
    numbers->count = 0;
    numbers->capacity = sizeof numbers->few / sizeof *numbers->few;
    numbers->many = NULL;
}

static inline long long *items_of(Numbers *numbers)
{
    return numbers->many == NULL ? numbers->few : numbers->many;
}

static void forget_numbers(Numbers *numbers)
{
    PyMem_Free(numbers->many);
    start_numbers(numbers);
}

static int add_number(Numbers *numbers, long long number)
{
    if (numbers->count == numbers->capacity) {
        long long *wider = PyMem_Realloc(numbers->many, numbers->capacity * 2 * sizeof *wider);
        if (wider == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (numbers->many == NULL)
            memcpy(wider, numbers->few, sizeof numbers->few);
        numbers->many = wider;
        numbers->capacity *= 2;
    }
    items_of(numbers)[numbers->count++] = number;
    return 0;
}

/* Every `each`-th number, the first of them at `from`. */
static PyObject *as_bytes(Numbers *numbers, int from, int each)
{
    int count = numbers->count / each;
    PyObject *found = PyBytes_FromStringAndSize(NULL, count * sizeof(long long));
    for (int i = 0; found != NULL && i < count; i++)
        memcpy(PyBytes_AS_STRING(found) + i * sizeof(long long), items_of(numbers) + from + i * each, sizeof(long long));
    return found;
}

enum { W_OP, W_KIND, W_SHAPE, W_STRIDE, W_INDEX, W_STACK, W_REFERENCES };

/* Numbers as numbers and tuples shared between writes: once the log is full every new write lets an old one go, and
 * that must not touch memory that has long left the processor's caches. */
typedef struct {
    long long clock, storage, version, offset, sequence, steps; /* version is -1 where it is not known */
    PyObject *references[W_REFERENCES];
    int itemsize;
    char grad_enabled, is_parameter;
} LoggedWrite;

/* A step of an optimizer that begins (`name` is its class, `numbers` for each of its parameters the storage and
 * the version) or ends (`name` and `stack` are NULL, `numbers` the versions). As numbers in one place for the same reason. */
typedef struct {
    long long clock, steps, sequence;
    void *optimizer;
    PyObject *name, *stack;
    Numbers numbers;
} LoggedStep;

/* A call into the engine; the fields of what Core.backward_log shows. */
typedef struct {
    long long clock, begun, ended, steps;
    unsigned long long life;
    unsigned long thread;
    PyObject *stack, *retain, *accumulate;
    PyObject *outputs; /* a weak reference, or a tuple of them and of None */
} LoggedBackward;

static void drop_step(LoggedStep *step)
{
    Py_CLEAR(step->name);
    Py_CLEAR(step->stack);
    forget_numbers(&step->numbers);
}

static void drop_backward(LoggedBackward *backward)
{
    Py_CLEAR(backward->stack);
    Py_CLEAR(backward->retain);
    Py_CLEAR(backward->accumulate);
    Py_CLEAR(backward->outputs);
}

static void drop_references(LoggedWrite *write)
{
    for (int i = 0; i < W_REFERENCES; i++)
        Py_CLEAR(write->references[i]);
}

/* Tuples of ints seen lately, by a hash of what they hold; a new one simply takes the place of another. */
#define TUPLES_KEPT 1024
static PyObject *shared_tuples[TUPLES_KEPT];

/* A new reference to a plain tuple equal to `given`, the same one each time while it is remembered. `given` is let go and
 * may be NULL. What is no tuple of ints comes back as it is. */
static PyObject *shared(PyObject *given)
{
    long long numbers[16];
    if (given == NULL || !PyTuple_Check(given))
        return given;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    int is_common = count <= 16;
    uint64_t hash = (uint64_t)count;
    for (Py_ssize_t i = 0; is_common && i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(given, i);
        int overflow = 1;
        if (PyLong_CheckExact(item))
            numbers[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        is_common = !overflow;
        if (is_common)
            hash = mixed(hash, NULL, 0) + (uint64_t)numbers[i];
    }
    PyObject **place = NULL;
    if (is_common) {
        place = shared_tuples + mixed(hash, NULL, 0) % TUPLES_KEPT;
        PyObject *known = *place;
        int is_equal = known != NULL && PyTuple_GET_SIZE(known) == count;
        for (Py_ssize_t i = 0; is_equal && i < count; i++) {
            PyObject *item = PyTuple_GET_ITEM(known, i);
            is_equal = item == PyTuple_GET_ITEM(given, i) || PyLong_AsLongLong(item) == numbers[i];
        }
        if (is_equal) {
            Py_DECREF(given);
            return Py_NewRef(known);
        }
    }
    if (!PyTuple_CheckExact(given)) {
        PyObject *plain = PyTuple_GetSlice(given, 0, count);
        Py_DECREF(given);
        given = plain;
    }
    if (place != NULL && given != NULL) {
        PyObject *forgotten = *place;
        *place = Py_NewRef(given);
        Py_XDECREF(forgotten);
    }
    return given;
}

/* ---- Core ------------------------------------------------------------------------------------------------------- */

#define QUIET_NODES 1024

typedef struct {
    PyObject_HEAD
    char active;
    long long open_steps, clock, saves;
    PyObject *open; /* by the id of an optimizer whose step has begun its thread; no count, for one that raised begins again */
    PyObject *optimizer_code; /* the function of torch's optimizers that called last */
    Ring nodes, writes, step_log, backward_log;
    unsigned long long backwards_logged;
    long long write_count, steps, log_errors, backwards, backward_end;
    long long quiet_nodes, quiet_from; /* so many Nodes from that number on are worth telling `on_quiet` */
    PyObject *optimizer_folder;
    PyObject *running; /* a list of the backward calls that run */
    PyObject *settled; /* the ids of the optimizers whose steps nobody wants to be told of any more; a set */
    PyObject *on_failure; /* called with a record of `running` and the exception that ends it */
    PyObject *on_enter;   /* called with a record of `running` and what else the engine was given, before it runs */
    PyObject *on_leave;   /* called with a record of `running` whose backward has ended well */
    PyObject *on_round;   /* called with a record of `running` at the 1st, 2nd, 4th, 8th ... call of one line, and that number */
    PyObject *on_differentiable; /* called with a record of `running`, inputs and result, after a call with create_graph */
    PyObject *quiet_operators; /* the ids of operators that write nothing; a set */
    PyObject *on_operator;     /* called with the positional (first the operator) and the named arguments of a call */
    PyObject *on_step_begin, *on_step_end; /* called with an optimizer that is not in `settled` */
    PyObject *on_result;  /* called with the name, the arguments and the result of each call */
    PyObject *on_nodes;   /* called with what holds the Nodes that a call has made, the first number and their end */
    PyObject *on_quiet;   /* called with the number of the next Node when `quiet_nodes` are reached */
    PyObject *on_write;   /* called while a backward runs with a written tensor, what was called, and the stack */
    PyObject *before_write; /* called with what is about to be written */
    char tells_all_writes; /* on_write is called at any time */
    PyObject *lets_pass;   /* exceptions of this class reach the program from whatever is called here; NULL, None: none */
    Stack **stacks; /* open addressing; capacity is 0 or a power of two, at most half full */
    size_t stack_capacity, stack_count;
} Core;

static PyTypeObject Core_Type;

/* Forgetting runs foreign code (a code object can have weak references), so a log is emptied before it is let go. */
static void forget_stacks(Core *core)
{
    Stack **stacks = core->stacks;
    size_t capacity = core->stack_capacity;
    core->stacks = NULL;
    core->stack_capacity = core->stack_count = 0;
    for (size_t i = 0; i < capacity; i++)
        Py_XDECREF(stacks[i]);
    PyMem_Free(stacks);
}

static void forget_logs(Core *core)
{
    Ring nodes = core->nodes, writes = core->writes, steps = core->step_log, backwards = core->backward_log;
    Ring *rings[] = {&core->nodes, &core->writes, &core->step_log, &core->backward_log};
    for (int i = 0; i < 4; i++)
        memset(rings[i], 0, sizeof(Ring));
    for (size_t i = 0; i < nodes.count; i++)
        Py_DECREF(((LoggedNodes *)nodes.items)[i].stack);
    for (size_t i = 0; i < writes.count; i++)
        drop_references((LoggedWrite *)writes.items + i);
    for (size_t i = 0; i < steps.count; i++)
        drop_step((LoggedStep *)steps.items + i);
    for (size_t i = 0; i < backwards.count; i++)
        drop_backward((LoggedBackward *)backwards.items + i);
    PyMem_Free(nodes.items);
    PyMem_Free(writes.items);
    PyMem_Free(steps.items);
    PyMem_Free(backwards.items);
}

static int widen_stacks(Core *core)
{
    size_t capacity = core->stack_capacity ? core->stack_capacity * 2 : 256;
    Stack **stacks = PyMem_Calloc(capacity, sizeof *stacks);
    if (stacks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < core->stack_capacity; i++) {
        Stack *stack = core->stacks[i];
        if (stack == NULL)
            continue;
        size_t place = stack->hash & (capacity - 1);
        while (stacks[place] != NULL)
            place = (place + 1) & (capacity - 1);
        stacks[place] = stack;
    }
    PyMem_Free(core->stacks);
    core->stacks = stacks;
    core->stack_capacity = capacity;
    return 0;
}

/* The place in the table of the stack with these frames, or the free place where it belongs. The table is never full. */
static inline Stack **place_of(Core *core, PyObject *const *codes, const int *lastis, Py_ssize_t depth, uint64_t hash)
{
    size_t mask = core->stack_capacity - 1, place = hash & mask;
    for (Stack *known; (known = core->stacks[place]) != NULL; place = (place + 1) & mask)
        if (known->hash == hash && Py_SIZE(known) == depth && !memcmp(known->codes, codes, depth * sizeof *codes) &&
            !memcmp(lastis_of(known), lastis, depth * sizeof *lastis))
            break;
    return core->stacks + place;
}

/* The code objects and places of the frames that run, innermost first, `skip` of them left out: how many there are, -1
 * with an exception. The code objects are borrowed: the frames are suspended below this call and keep them alive. */
#ifdef FRAMES_IN_PLACE
static inline Py_ssize_t read_frames(long long skip, PyObject **codes, int *lastis)
{
    Py_ssize_t depth = 0;
    struct _PyInterpreterFrame *frame = PyThreadState_Get()->cframe->current_frame;
    for (; frame != NULL && depth < DEPTH_KEPT; frame = frame->previous) {
        if (_PyFrame_IsIncomplete(frame) || skip-- > 0)
            continue;
        codes[depth] = (PyObject *)frame->f_code;
        lastis[depth++] = _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT);
    }
    return depth;
}

/* The code object of the Python frame that runs, borrowed from it; NULL where there is none. */
static inline PyCodeObject *running_code(void)
{
    struct _PyInterpreterFrame *frame = PyThreadState_Get()->cframe->current_frame;
    while (frame != NULL && _PyFrame_IsIncomplete(frame))
        frame = frame->previous;
    return frame == NULL ? NULL : frame->f_code;
}
#else
static inline int lasti_of(PyFrameObject *frame)
{
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return frame->f_lasti < 0 ? -1 : frame->f_lasti * 2; /* counted in instructions of two bytes */
#endif
}

static inline Py_ssize_t read_frames(long long skip, PyObject **codes, int *lastis)
{
    Py_ssize_t depth = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL && depth < DEPTH_KEPT) {
        if (skip > 0)
            skip--;
        else {
            codes[depth] = (PyObject *)PyFrame_GetCode(frame);
            Py_DECREF(codes[depth]);
            lastis[depth++] = lasti_of(frame);
        }
        PyFrameObject *outer = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = outer;
    }
    if (frame == NULL && PyErr_Occurred())
        return -1;
    Py_XDECREF(frame);
    return depth;
}

static inline PyCodeObject *running_code(void)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    if (frame == NULL)
        return NULL;
    PyCodeObject *code = PyFrame_GetCode(frame);
    Py_DECREF(code);
    Py_DECREF(frame);
    return code;
}
#endif

/* The stack of the Python frame that runs, `skip` frames further out: a new reference, equal stacks being one object.
 * It is empty where no Python frame is left (a hook called in a thread of the engine). */
static PyObject *stack_here(Core *core, long long skip)
{
    PyObject *codes[DEPTH_KEPT];
    int lastis[DEPTH_KEPT];
    Py_ssize_t depth = read_frames(skip, codes, lastis);
    if (depth < 0)
        return NULL;
    uint64_t hash = 0;
    for (Py_ssize_t i = 0; i < depth; i++)
        hash = mixed(hash, codes[i], lastis[i]);

    if (core->stack_count) {
        Stack *known = *place_of(core, codes, lastis, depth, hash);
        if (known != NULL)
            return Py_NewRef((PyObject *)known);
    }
    if (core->stack_count >= STACKS_KEPT)
        forget_stacks(core);
    if (core->stack_count * 2 >= core->stack_capacity && widen_stacks(core) < 0)
        return NULL;
    Stack **place = place_of(core, codes, lastis, depth, hash);
    if (*place == NULL) {
        if ((*place = new_stack(codes, lastis, depth, hash)) == NULL)
            return NULL;
        core->stack_count++;
    }
    return Py_NewRef((PyObject *)*place);
}

/* Puts `names` in order of `given`: what was passed by position and by keyword, NULL where nothing was. */
static int take_arguments(const char *function, const char *const *names, Py_ssize_t needed, Py_ssize_t most,
                          PyObject *const *args, Py_ssize_t count, PyObject *keywords, PyObject **given)
{
    memset(given, 0, most * sizeof *given);
    if (count > most) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", function, most, count);
        return -1;
    }
    memcpy(given, args, count * sizeof *given);
    for (Py_ssize_t k = 0; keywords != NULL && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *keyword = PyTuple_GET_ITEM(keywords, k);
        Py_ssize_t i = 0;
        while (i < most && PyUnicode_CompareWithASCIIString(keyword, names[i]))
            i++;
        if (i == most || given[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected or repeated argument '%U'", function, keyword);
            return -1;
        }
        given[i] = args[count + k];
    }
    for (Py_ssize_t i = 0; i < needed; i++)
        if (given[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", function, names[i]);
            return -1;
        }
    return 0;
}

static PyObject *Core_tick(Core *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLongLong(++self->clock);
}

static PyObject *Core_clear_logs(Core *self, PyObject *Py_UNUSED(ignored))
{
    forget_stacks(self);
    forget_logs(self);
    self->saves = self->write_count = self->steps = self->log_errors = self->backwards = 0;
    Py_RETURN_NONE;
}

static PyObject *Core_stack(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"skip"};
    PyObject *given[1];
    long long skip = 0;
    if (take_arguments("stack", names, 0, 1, args, count, keywords, given) < 0)
        return NULL;
    if (given[0] != NULL && (skip = PyLong_AsLongLong(given[0])) == -1 && PyErr_Occurred())
        return NULL;
    return stack_here(self, skip);
}

static inline LoggedNodes *nodes_at(const Ring *ring, size_t i)
{
    return (LoggedNodes *)ring->items + ((ring->first + i) & (ring->capacity - 1));
}

static PyObject *Core_nodes_near(Core *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "nodes_near() needs a sequence number and a thread");
    long long sequence = PyLong_AsLongLong(args[0]);
    unsigned long thread = PyLong_AsUnsignedLongMask(args[1]);
    if (PyErr_Occurred())
        return NULL;
    LoggedNodes *exact = NULL, *before = NULL, *after = NULL;
    for (size_t i = 0; i < self->nodes.count; i++) {
        LoggedNodes *nodes = nodes_at(&self->nodes, i);
        if (nodes->thread != thread)
            continue;
        if (nodes->first <= sequence && sequence < nodes->end) {
            /* Of calls within calls the innermost one made the Node. */
            if (exact == NULL || nodes->end - nodes->first <= exact->end - exact->first)
                exact = nodes;
        } else if (nodes->end <= sequence) {
            if (before == NULL || nodes->end >= before->end)
                before = nodes;
        } else if (after == NULL || nodes->first < after->first)
            after = nodes;
    }
    /* Copied before anything is allocated: that can run the program's code, which can log and move what lies here. */
    LoggedNodes found[2];
    int known = 0;
    if (exact != NULL)
        found[known++] = *exact;
    else {
        if (before != NULL)
            found[known++] = *before;
        if (after != NULL)
            found[known++] = *after;
    }
    for (int i = 0; i < known; i++)
        Py_INCREF(found[i].stack);
    PyObject *list = PyList_New(0);
    for (int i = 0; i < known; i++) {
        PyObject *item =
            list == NULL ? NULL : Py_BuildValue("LLLO", found[i].first, found[i].end, found[i].clock, found[i].stack);
        if (list != NULL && (item == NULL || PyList_Append(list, item) < 0))
            Py_CLEAR(list);
        Py_XDECREF(item);
        Py_DECREF(found[i].stack);
    }
    return list;
}

static PyObject *Core_ran_since(Core *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "ran_since() needs a stack, a sequence number and a thread");
    long long sequence = PyLong_AsLongLong(args[1]);
    unsigned long thread = PyLong_AsUnsignedLongMask(args[2]);
    if (PyErr_Occurred())
        return NULL;
    for (size_t i = 0; i < self->nodes.count; i++) {
        LoggedNodes *nodes = nodes_at(&self->nodes, i);
        if (nodes->stack == args[0] && nodes->end > sequence && nodes->thread == thread)
            Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static inline LoggedWrite *write_at(const Ring *ring, size_t i)
{
    return (LoggedWrite *)ring->items + ((ring->first + i) & (ring->capacity - 1));
}

/* The logged writes younger than the clock `after`, oldest first. They are copied first: Python runs what it likes. */
static PyObject *list_writes(Core *self, long long after)
{
    size_t first = self->writes.count;
    while (first > 0 && write_at(&self->writes, first - 1)->clock > after)
        first--;
    Py_ssize_t count = (Py_ssize_t)(self->writes.count - first), i;
    LoggedWrite *copy = PyMem_Malloc(count ? (size_t)count * sizeof(LoggedWrite) : 1);
    if (copy == NULL)
        return PyErr_NoMemory();
    for (i = 0; i < count; i++) {
        copy[i] = *write_at(&self->writes, first + (size_t)i);
        for (int k = 0; k < W_REFERENCES; k++)
            Py_INCREF(copy[i].references[k]);
    }
    PyObject *list = PyList_New(count);
    for (i = 0; list != NULL && i < count; i++) {
        LoggedWrite *w = copy + i;
        PyObject **r = w->references;
        PyObject *version = w->version < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(w->version);
        PyObject *fields = Py_BuildValue("LLNOOLOOiOOLOOL", w->clock, w->storage, version, r[W_OP], r[W_KIND], w->offset,
                                         r[W_SHAPE], r[W_STRIDE], w->itemsize, r[W_INDEX], r[W_STACK], w->sequence,
                                         w->grad_enabled ? Py_True : Py_False, w->is_parameter ? Py_True : Py_False,
                                         w->steps);
        if (fields == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, fields);
    }
    for (i = 0; i < count; i++)
        drop_references(copy + i);
    PyMem_Free(copy);
    return list;
}

static PyObject *Core_writes(Core *self, PyObject *Py_UNUSED(ignored))
{
    return list_writes(self, -1);
}

static PyObject *Core_writes_after(Core *self, PyObject *given)
{
    long long after = PyLong_AsLongLong(given);
    return after == -1 && PyErr_Occurred() ? NULL : list_writes(self, after);
}

static PyObject *Core_lost_writes_after(Core *self, PyObject *given)
{
    long long after = PyLong_AsLongLong(given);
    if (after == -1 && PyErr_Occurred())
        return NULL;
    int is_cut = self->write_count > (long long)self->writes.count;
    return PyBool_FromLong(is_cut && (self->writes.count == 0 || write_at(&self->writes, 0)->clock > after));
}

/* The integer of an exact int that is given away; -1 with an exception otherwise. A symbolic integer is refused rather
 * than asked for its value, which would change what is traced. */
static long long plain_integer(PyObject *given)
{
    if (given != NULL && !PyLong_CheckExact(given)) {
        PyErr_Format(PyExc_TypeError, "expected an int, not %.80s", Py_TYPE(given)->tp_name);
        Py_CLEAR(given);
    }
    return integer(given);
}

/* Storage, version and geometry of an ordinary tensor; -1 with an exception where there is none of them. */
static int read_geometry(PyObject *tensor, LoggedWrite *write)
{
    PyObject **r = write->references;
    if (((write->storage = plain_integer(storage_identity(tensor))) == -1 && PyErr_Occurred()) ||
        ((write->version = plain_integer(attribute(tensor, VERSION))) == -1 && PyErr_Occurred()) ||
        ((write->offset = plain_integer(method(tensor, STORAGE_OFFSET))) == -1 && PyErr_Occurred()) ||
        (r[W_SHAPE] = shared(attribute(tensor, SHAPE))) == NULL ||
        (r[W_STRIDE] = shared(method(tensor, STRIDE))) == NULL ||
        ((write->itemsize = (int)plain_integer(method(tensor, ELEMENT_SIZE))) == -1 && PyErr_Occurred()))
        return -1;
    return 0;
}

/* The same where an ordinary tensor's way failed with a RuntimeError or AttributeError. */
static int read_weak_identity(PyObject *tensor, LoggedWrite *write)
{
    PyObject **r = write->references, *version, *shape, *stride;
    PyObject *found = PyObject_CallOneArg(torch.weak_identity, tensor);
    if (found == NULL)
        return -1;
    int ok = PyArg_ParseTuple(found, "LO(LOOi):weak_identity", &write->storage, &version, &write->offset, &shape, &stride,
                              &write->itemsize);
    if (ok) {
        write->version = version == Py_None ? -1 : PyLong_AsLongLong(version);
        r[W_SHAPE] = shared(Py_NewRef(shape));
        r[W_STRIDE] = shared(Py_NewRef(stride));
        ok = !PyErr_Occurred();
    }
    Py_DECREF(found);
    return ok ? 0 : -1;
}

static int is_set(PyObject *callback)
{
    return callback != NULL && callback != Py_None;
}

/* Calls a callback with arguments as Py_BuildValue takes them, in a tuple; it may be replaced or taken away, by itself or
 * by another thread. None where there is none. */
static PyObject *call_held(PyObject *callback, const char *format, ...)
{
    if (!is_set(callback))
        Py_RETURN_NONE;
    va_list given;
    Py_INCREF(callback);
    va_start(given, format);
    PyObject *arguments = Py_VaBuildValue(format, given);
    va_end(given);
    PyObject *told = arguments == NULL ? NULL : PyObject_CallObject(callback, arguments);
    Py_XDECREF(arguments);
    Py_DECREF(callback);
    return told;
}

static int log_write_hushed(Core *core, PyObject *tensor, PyObject *op, PyObject *kind, PyObject *index, PyObject *stack)
{
    LoggedWrite write = {0}, dropped;
    PyObject **r = write.references;
    /* A class of its own may run code of the program's where it is asked for sizes. */
    if (!is_plain(tensor)) {
        if (read_weak_identity(tensor, &write) < 0)
            goto failed;
    } else if (read_geometry(tensor, &write) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_AttributeError))
            goto failed;
        PyErr_Clear();
        drop_references(&write);
        if (read_weak_identity(tensor, &write) < 0)
            goto failed;
    }
    r[W_OP] = Py_NewRef(op);
    r[W_KIND] = Py_NewRef(kind);
    r[W_INDEX] = Py_NewRef(index);
    r[W_STACK] = Py_NewRef(stack);

    write.sequence = integer(PyObject_Vectorcall(torch.sequence_number, NULL, 0, NULL));
    if (write.sequence == -1 && PyErr_Occurred())
        goto failed;
    int flag = truth(PyObject_Vectorcall(torch.is_grad_enabled, NULL, 0, NULL));
    if (flag < 0)
        goto failed;
    write.grad_enabled = (char)flag;
    if ((flag = truth(attribute(tensor, IS_LEAF))) > 0)
        flag = truth(attribute(tensor, REQUIRES_GRAD));
    if (flag < 0) {
        /* A view made under no_grad whose base was then written refuses to tell its grad_fn; it is no leaf. */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            goto failed;
        PyErr_Clear();
        flag = 0;
    }
    write.is_parameter = (char)flag;

    LoggedWrite *place = ring_push(&core->writes, sizeof(LoggedWrite), WRITES_KEPT, &dropped);
    if (place == NULL)
        goto failed;
    core->write_count++;
    write.clock = ++core->clock;
    write.steps = core->steps;
    *place = write;
    drop_references(&dropped);
    return 0;

failed:
    /* Letting go of references must not run with an exception set. */
    {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        drop_references(&write);
        PyErr_Restore(type, value, traceback);
    }
    return -1;
}

static int log_write(Core *core, PyObject *tensor, PyObject *op, PyObject *kind, PyObject *index, PyObject *stack)
{
    PyObject *before = hush(tensor);
    int status = log_write_hushed(core, tensor, op, kind, index, stack);
    unhush(before);
    if (status < 0 || !is_set(core->on_write) || !(core->tells_all_writes || PyList_GET_SIZE(core->running) > 0))
        return status;
    PyObject *told = call_held(core->on_write, "(OOO)", tensor, op, stack);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

static PyObject *Core_log_write(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"tensor", "op", "kind", "index", "stack"};
    PyObject *given[5];
    if (take_arguments("log_write", names, 5, 5, args, count, keywords, given) < 0 ||
        log_write(self, given[0], given[1], given[2], given[3], given[4]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- writers ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original;
    Core *core;
    /* The C function behind a __setitem__ that a C type defines, and the type whose instances it takes. */
    objobjargproc assign;
    PyTypeObject *indexed;
    Py_ssize_t position;       /* -1: none */
    char is_setitem, is_plain; /* is_plain: writes nothing, wrapped for the Nodes it makes */
    char is_operator;          /* calls an operator, its first argument: `on_operator` knows what that writes */
    PyObject *op, *kind;
    PyObject *keyword; /* NULL: none */
    PyObject *dictionary, *weak_references;
} Writer;

static inline int is_writer(PyObject *object)
{
    return Py_IS_TYPE(object, &MethodWriter_Type) || Py_IS_TYPE(object, &FunctionWriter_Type);
}

/* New reference: `index` as a tuple if it is made of ints, slices of ints, None and ... only; else None. */
static PyObject *basic_index(PyObject *index)
{
    PyObject *const *parts = PyTuple_CheckExact(index) ? PySequence_Fast_ITEMS(index) : &index;
    Py_ssize_t count = PyTuple_CheckExact(index) ? PyTuple_GET_SIZE(index) : 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PySlice_Check(parts[i])) {
            PySliceObject *slice = (PySliceObject *)parts[i];
            if ((slice->start != Py_None && !PyLong_CheckExact(slice->start)) ||
                (slice->stop != Py_None && !PyLong_CheckExact(slice->stop)) ||
                (slice->step != Py_None && !PyLong_CheckExact(slice->step)))
                Py_RETURN_NONE;
        } else if (!PyLong_CheckExact(parts[i]) && parts[i] != Py_None && parts[i] != Py_Ellipsis)
            Py_RETURN_NONE;
    }
    return shared(PyTuple_CheckExact(index) ? Py_NewRef(index) : PyTuple_Pack(1, index));
}

static inline int is_of_optimizers(Core *core, PyCodeObject *code)
{
    return core->optimizer_folder != NULL && PyUnicode_Check(core->optimizer_folder)
               ? (int)PyUnicode_Tailmatch(code->co_filename, core->optimizer_folder, 0, PY_SSIZE_T_MAX, -1)
               : 0;
}

/* Whether the code that called lies in torch's optimizers, whose inner writes are accounted for per step. */
static int called_by_optimizer(Core *core)
{
    PyCodeObject *code = running_code();
    if (code == NULL)
        return 0;
    /* An optimizer's update is one function that calls dozens of operations. */
    if ((PyObject *)code == core->optimizer_code)
        return 1;
    int found = is_of_optimizers(core, code);
    if (found > 0) {
        PyObject *before = core->optimizer_code;
        core->optimizer_code = Py_NewRef((PyObject *)code);
        Py_XDECREF(before);
    }
    return found;
}

static int log_target(Writer *writer, PyObject *target, PyObject *key)
{
    Core *core = writer->core;
    int found;
    PyObject *index = key == NULL ? Py_NewRef(Py_None) : basic_index(key);
    PyObject *stack = index == NULL ? NULL : stack_here(core, 0);
    if (stack == NULL || (found = is_tensor(target)) < 0)
        found = -1;
    else if (found)
        found = log_write(core, target, writer->op, writer->kind, index, stack);
    else if (PyTuple_Check(target) || PyList_Check(target))
        /* The size is read anew each time: a subclass of tensor may run Python code that changes the list. */
        for (Py_ssize_t i = 0; found == 0 && i < PySequence_Fast_GET_SIZE(target); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(target, i));
            if ((found = is_tensor(item)) > 0)
                found = log_write(core, item, writer->op, writer->kind, index, stack);
            Py_DECREF(item);
        }
    Py_XDECREF(index);
    Py_XDECREF(stack);
    return found;
}

/* Borrowed: the value passed by keyword `name`, NULL where there is none. */
static PyObject *passed_by_keyword(PyObject *name, PyObject *const *values, PyObject *keywords)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GET_ITEM(keywords, i) == name)
            return values[i];
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(keywords, i)) == PyUnicode_GET_LENGTH(name) &&
            PyUnicode_Compare(PyTuple_GET_ITEM(keywords, i), name) == 0)
            return values[i];
    return NULL;
}

/* The number the next Node of this thread will carry; 0 where torch does not tell. */
static inline long long sequence_here(void)
{
    long long number = integer(PyObject_Vectorcall(torch.sequence_number, NULL, 0, NULL));
    if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return number;
}

/* Logs that the call which runs has made the Nodes from `first` up to `end`. */
static int log_nodes(Core *core, long long first, long long end)
{
    unsigned long thread = PyThread_get_thread_ident();
    LoggedNodes *last = core->nodes.count ? nodes_at(&core->nodes, core->nodes.count - 1) : NULL;
    if (last != NULL && last->thread == thread && last->first == first && last->end == end &&
        last->clock == core->clock)
        return 0; /* a call within this one has logged them */
    PyObject *stack = stack_here(core, 0);
    if (stack == NULL)
        return -1;
    last = core->nodes.count ? nodes_at(&core->nodes, core->nodes.count - 1) : NULL;
    core->saves++;
    /* The same line again and nothing logged in between: one entry serves a loop. */
    if (last != NULL && last->thread == thread && last->stack == stack && last->end == first && last->clock == core->clock) {
        last->end = end;
        Py_DECREF(stack);
        return 0;
    }
    LoggedNodes dropped, *place = ring_push(&core->nodes, sizeof(LoggedNodes), NODES_KEPT, &dropped);
    if (place == NULL) {
        Py_DECREF(stack);
        return -1;
    }
    *place = (LoggedNodes){first, end, ++core->clock, thread, stack};
    Py_XDECREF(dropped.stack);
    return 0;
}

/* What goes wrong while logging is counted; what is no Exception, or of `lets_pass`, reaches the program. -1: it does. */
static int forgive(Core *core)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        (is_set(core->lets_pass) && PyErr_ExceptionMatches(core->lets_pass)))
        return -1;
    PyErr_Clear();
    core->log_errors++;
    return 0;
}

/* Calls `listener` with `name` (where it is not NULL), the positional and the named arguments of a call, and `result`
(where it is not NULL). */
static int tell_call(PyObject *listener, PyObject *name, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                     PyObject *result)
{
    PyObject *given = PyTuple_New(count), *named = PyDict_New(), *told = NULL;
    int failed = given == NULL || named == NULL;
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; !failed && keywords != NULL && i < PyTuple_GET_SIZE(keywords); i++)
        failed = PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[count + i]) < 0;
    if (!failed) {
        Py_INCREF(listener);
        told = name == NULL ? PyObject_CallFunctionObjArgs(listener, given, named, NULL)
                            : PyObject_CallFunctionObjArgs(listener, name, given, named, result, NULL);
        Py_DECREF(listener);
    }
    Py_XDECREF(given);
    Py_XDECREF(named);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

/* Tells `on_operator` of a call of the operator args[0], with all arguments, unless it is known to write nothing. */
static int tell_operator(Core *core, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *number = PyLong_FromVoidPtr(args[0]);
    int is_quiet = number == NULL ? -1 : PySet_Contains(core->quiet_operators, number);
    Py_XDECREF(number);
    return is_quiet != 0 ? is_quiet : tell_call(core->on_operator, NULL, args, count, keywords, NULL);
}

/* Logs and tells the Nodes from number `first` on that a call has made, which `holder` holds; -1: the program is to see
 * the exception. */
static int tell_nodes(Core *core, long long first, PyObject *holder)
{
    long long end = sequence_here();
    if (end == first)
        return 0;
    if (log_nodes(core, first, end) < 0 && forgive(core) < 0)
        return -1;
    if ((end < core->quiet_from || end - core->quiet_from >= core->quiet_nodes) && is_set(core->on_quiet)) {
        PyObject *told = call_held(core->on_quiet, "(L)", end);
        if (told == NULL && forgive(core) < 0)
            return -1;
        Py_XDECREF(told);
    }
    if (is_set(core->on_nodes)) {
        PyObject *told = call_held(core->on_nodes, "(OLL)", holder, first, end);
        if (told == NULL && forgive(core) < 0)
            return -1;
        Py_XDECREF(told);
    }
    return 0;
}

/* Whether what is called now is logged: not where an optimizer calls, whose writes are accounted for per step. -1 with
 * an exception. */
static inline int is_logged(Core *core)
{
    if (!core->active || !core->open_steps)
        return core->active;
    int inside = called_by_optimizer(core);
    return inside < 0 ? forgive(core) : !inside;
}

/* What a call of a writer that writes is given to write to, borrowed; NULL where it is given nothing. */
static PyObject *target_of(Writer *writer, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    int has_keywords = keywords != NULL && PyTuple_GET_SIZE(keywords) > 0;
    if (writer->is_setitem)
        return count > 1 ? args[0] : NULL;
    if (writer->keyword != NULL) {
        PyObject *given = has_keywords ? passed_by_keyword(writer->keyword, args + count, keywords) : NULL;
        return given == Py_None ? NULL : given;
    }
    if (writer->position >= 0 && count > writer->position)
        return args[writer->position];
    return has_keywords ? args[count] : NULL;
}

/* Tells `before_write` what is about to be written; -1: the program is to see the exception. */
static int tell_before(Writer *writer, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *target = target_of(writer, args, count, keywords);
    if (target == NULL)
        return 0;
    PyObject *before_write = Py_NewRef(writer->core->before_write);
    PyObject *told = PyObject_CallOneArg(before_write, target);
    Py_DECREF(before_write);
    Py_XDECREF(told);
    return told == NULL ? forgive(writer->core) : 0;
}

static PyObject *Writer_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    Writer *writer = (Writer *)self;
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    Core *core = writer->core;
    int is_active = is_logged(core);
    if (is_active < 0)
        return NULL;
    if (is_active && is_set(core->before_write) && !writer->is_plain && !writer->is_operator &&
        tell_before(writer, args, count, keywords) < 0)
        return NULL;
    long long first = is_active ? sequence_here() : 0;
    PyObject *result;
    if (writer->assign != NULL && count == 3 && keywords == NULL && PyObject_TypeCheck(args[0], writer->indexed))
        result = writer->assign(args[0], args[1], args[2]) < 0 ? NULL : Py_NewRef(Py_None);
    else
        result = PyObject_Vectorcall(writer->original, args, flagged_count, keywords);
    if (result == NULL || !is_active || !core->active)
        return result;
    if (tell_nodes(core, first, result == Py_None && count > 0 ? args[0] : result) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (is_set(core->on_result) && tell_call(core->on_result, writer->op, args, count, keywords, result) < 0 &&
        forgive(core) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (writer->is_operator && count > 0 && is_set(core->on_operator) &&
        tell_operator(core, args, count, keywords) < 0 && forgive(core) < 0) {
        Py_DECREF(result);
        return NULL;
    }
    if (writer->is_plain)
        return result;

    PyObject *target = target_of(writer, args, count, keywords), *key = writer->is_setitem && count > 1 ? args[1] : NULL;
    if (target != NULL && log_target(writer, target, key) < 0 && forgive(core) < 0)
        Py_CLEAR(result);
    return result;
}

static int Writer_traverse(Writer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->core);
    Py_VISIT(self->dictionary);
    return 0;
}

/* Only the dictionary: a writer stays callable, and whatever cycle it is in has other members that can be cleared. */
static int Writer_clear(Writer *self)
{
    Py_CLEAR(self->dictionary);
    return 0;
}

static void Writer_dealloc(Writer *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->op);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->keyword);
    Py_XDECREF(self->dictionary);
    Py_XDECREF(self->core);
    PyObject_GC_Del(self);
}

static PyObject *Writer_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

static PyObject *Writer_repr(Writer *self)
{
    return PyObject_Repr(self->original);
}

/* A writer equals what it wraps: torch hands the writer to __torch_function__, where programs look functions up in tables
 * that they filled before. */
static Py_hash_t Writer_hash(Writer *self)
{
    return PyObject_Hash(self->original);
}

static PyObject *Writer_compare(PyObject *self, PyObject *other, int operation)
{
    if (operation != Py_EQ && operation != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    return PyObject_RichCompare(((Writer *)self)->original, is_writer(other) ? ((Writer *)other)->original : other,
                                operation);
}

static PyObject *Writer_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyObject_CallFunctionObjArgs(torch.reduction, self, ((Writer *)self)->original, NULL);
}

static PyObject *Writer_itself(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(self);
}

static PyMethodDef Writer_methods[] = {
    {"__reduce__", Writer_reduce, METH_NOARGS, NULL},
    {"__copy__", Writer_itself, METH_NOARGS, NULL},
    {"__deepcopy__", Writer_itself, METH_O, NULL},
    {NULL},
};

static PyGetSetDef Writer_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

#define WRITER_SLOTS                                                                                                   \
    .tp_basicsize = sizeof(Writer), .tp_vectorcall_offset = offsetof(Writer, vectorcall),                              \
    .tp_dictoffset = offsetof(Writer, dictionary), .tp_weaklistoffset = offsetof(Writer, weak_references),             \
    .tp_call = PyVectorcall_Call, .tp_repr = (reprfunc)Writer_repr, .tp_hash = (hashfunc)Writer_hash,                  \
    .tp_richcompare = Writer_compare, .tp_traverse = (traverseproc)Writer_traverse, .tp_clear = (inquiry)Writer_clear, \
    .tp_dealloc = (destructor)Writer_dealloc, .tp_methods = Writer_methods, .tp_getset = Writer_getset

static PyTypeObject MethodWriter_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.MethodWriter",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_descr_get = Writer_get,
    WRITER_SLOTS,
};

/* For originals that do not become methods in a class (builtin functions), so that the writer does not either. */
static PyTypeObject FunctionWriter_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.FunctionWriter",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    WRITER_SLOTS,
};

/* Lets `x[key] = value` go straight to the C function where the original does nothing but call it. */
static void find_indexing(Writer *writer)
{
    if (!Py_IS_TYPE(writer->original, &PyWrapperDescr_Type))
        return;
    PyWrapperDescrObject *wrapper = (PyWrapperDescrObject *)writer->original;
    PyTypeObject *owner = PyDescr_TYPE(wrapper);
    PyMappingMethods *mapping = owner->tp_as_mapping;
    if (mapping == NULL)
        return;
    if (strcmp(wrapper->d_base->name, "__setitem__") == 0 && (void *)mapping->mp_ass_subscript == wrapper->d_wrapped)
        writer->assign = mapping->mp_ass_subscript;
    writer->indexed = owner;
}

static PyObject *Core_writer(Core *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"original", "op", "kind", "position", "keyword"};
    PyObject *given[5];
    if (take_arguments("writer", names, 5, 5, args, count, keywords, given) < 0)
        return NULL;
    if (!PyCallable_Check(given[0]) || !PyUnicode_Check(given[1]) || !PyUnicode_Check(given[2]) ||
        !(given[4] == Py_None || PyUnicode_Check(given[4]))) {
        PyErr_SetString(PyExc_TypeError, "writer() needs a callable, two strings, an int and a string or None");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(given[3]);
    if (position == -1 && PyErr_Occurred())
        return NULL;
    int binds = Py_TYPE(given[0])->tp_descr_get != NULL;
    Writer *writer = PyObject_GC_New(Writer, binds ? &MethodWriter_Type : &FunctionWriter_Type);
    if (writer == NULL)
        return NULL;
    memset((char *)writer + sizeof(PyObject), 0, sizeof(Writer) - sizeof(PyObject));
    writer->vectorcall = Writer_vectorcall;
    writer->original = Py_NewRef(given[0]);
    writer->op = Py_NewRef(given[1]);
    writer->kind = Py_NewRef(given[2]);
    writer->position = position;
    writer->core = (Core *)Py_NewRef((PyObject *)self);
    writer->is_setitem = PyUnicode_CompareWithASCIIString(given[2], "setitem") == 0;
    writer->is_operator = PyUnicode_CompareWithASCIIString(given[2], "operator") == 0;
    writer->is_plain = writer->is_operator || PyUnicode_CompareWithASCIIString(given[2], "plain") == 0;
    if (given[4] != Py_None) {
        writer->keyword = Py_NewRef(given[4]);
        PyUnicode_InternInPlace(&writer->keyword);
    }
    find_indexing(writer);
    PyObject_GC_Track(writer);
    PyObject *dressed = PyObject_CallFunctionObjArgs(torch.dress, writer, given[0], NULL);
    Py_DECREF(writer);
    return dressed;
}

/* ---- indexing --------------------------------------------------------------------------------------------------- */

/* The C function behind `tensor[index]`, and the core that logs what it does; NULL while nobody watches. */
static binaryfunc indexing_original;
static Core *indexing_core;

/* Tells `on_result` of an indexing; -1: the program is to see the exception. */
static int tell_indexed(Core *core, PyObject *tensor, PyObject *key, PyObject *result)
{
    if (!is_set(core->on_result))
        return 0;
    PyObject *name = PyUnicode_InternFromString("__getitem__"), *args[] = {tensor, key};
    int failed = name == NULL || tell_call(core->on_result, name, args, 2, NULL, result) < 0;
    Py_XDECREF(name);
    return failed ? forgive(core) : 0;
}

/* Stands in mp_subscript of torch.Tensor and of the classes that inherit it. Setting the attribute __getitem__ instead would
 * make a sequence of every tensor (patches.py). */
static PyObject *logged_subscript(PyObject *self, PyObject *key)
{
    if (indexing_core == NULL || !indexing_core->active)
        return indexing_original(self, key);
    /* What runs within may switch watching off. */
    Core *core = (Core *)Py_NewRef((PyObject *)indexing_core);
    PyObject *result = NULL;
    int is_active = is_logged(core);
    if (is_active >= 0) {
        long long first = is_active ? sequence_here() : 0;
        result = indexing_original(self, key);
        if (result != NULL && is_active && core->active &&
            (tell_nodes(core, first, result) < 0 || tell_indexed(core, self, key, result) < 0))
            Py_CLEAR(result);
    }
    Py_DECREF(core);
    return result;
}

/* Replaces one function by another in mp_subscript of a type and of all types below it; -1 with an exception. */
static int replace_subscript(PyTypeObject *type, binaryfunc from, binaryfunc to)
{
    if (type->tp_as_mapping != NULL && type->tp_as_mapping->mp_subscript == from &&
        PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        type->tp_as_mapping->mp_subscript = to;
    PyObject *below = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int done = below == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(below); i++)
        if (PyType_Check(PyList_GET_ITEM(below, i)))
            done = replace_subscript((PyTypeObject *)PyList_GET_ITEM(below, i), from, to);
    Py_XDECREF(below);
    return done;
}

/* The C function behind torch.Tensor.__getitem__, NULL where something else stands there. */
static binaryfunc find_subscript(void)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)torch.tensor, "__getitem__");
    PyWrapperDescrObject *wrapper = (PyWrapperDescrObject *)found;
    binaryfunc subscript = NULL;
    if (found == NULL)
        PyErr_Clear();
    else if (Py_IS_TYPE(found, &PyWrapperDescr_Type) && PyType_IsSubtype(torch.tensor, PyDescr_TYPE(wrapper))) {
        PyMappingMethods *mapping = PyDescr_TYPE(wrapper)->tp_as_mapping;
        if (mapping != NULL && (void *)mapping->mp_subscript == wrapper->d_wrapped)
            subscript = mapping->mp_subscript;
    }
    Py_XDECREF(found);
    return subscript;
}

static PyObject *Core_watch_indexing(Core *self, PyObject *given)
{
    int wanted = PyObject_IsTrue(given);
    if (wanted < 0)
        return NULL;
    if (wanted && indexing_core == NULL) {
        if (indexing_original == NULL)
            indexing_original = find_subscript();
        if (indexing_original == NULL)
            Py_RETURN_NONE;
        indexing_core = (Core *)Py_NewRef((PyObject *)self);
        if (replace_subscript(torch.tensor, indexing_original, logged_subscript) < 0)
            return NULL;
    } else if (!wanted && indexing_core == self) {
        indexing_core = NULL;
        Py_DECREF(self);
        if (replace_subscript(torch.tensor, logged_subscript, indexing_original) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- steps and backward calls ----------------------------------------------------------------------------------- */

/* Adds the identity of a parameter's storage where asked for, and its version; -1 with an exception. */
static int add_parameter(PyObject *parameter, int with_storage, Numbers *numbers)
{
    long long number;
    if (with_storage) {
        number = integer(storage_identity(parameter));
        if (number == -1 && PyErr_Occurred()) {
            /* No ordinary storage (sparse): its steps are then told by the logged writes alone. */
            if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
                return -1;
            PyErr_Clear();
            number = 0;
        }
        if (add_number(numbers, number) < 0)
            return -1;
    }
    number = integer(attribute(parameter, VERSION));
    return number == -1 && PyErr_Occurred() ? -1 : add_number(numbers, number);
}

/* The same for each parameter of an optimizer. */
static int add_parameters(PyObject *optimizer, int with_storage, Numbers *numbers)
{
    static PyObject *groups_name, *params_name;
    if ((groups_name == NULL && (groups_name = PyUnicode_InternFromString("param_groups")) == NULL) ||
        (params_name == NULL && (params_name = PyUnicode_InternFromString("params")) == NULL))
        return -1;
    PyObject *given = PyObject_GetAttr(optimizer, groups_name);
    PyObject *groups = given == NULL ? NULL : PySequence_Fast(given, "param_groups cannot be iterated");
    Py_XDECREF(given);
    if (groups == NULL)
        return -1;
    int done = 0;
    /* Sizes are read anew each time: a subclass of tensor may run Python code that changes the lists. */
    for (Py_ssize_t i = 0; done == 0 && i < PySequence_Fast_GET_SIZE(groups); i++) {
        PyObject *group = Py_NewRef(PySequence_Fast_GET_ITEM(groups, i));
        given = PyObject_GetItem(group, params_name);
        Py_DECREF(group);
        PyObject *parameters = given == NULL ? NULL : PySequence_Fast(given, "params cannot be iterated");
        Py_XDECREF(given);
        if (parameters == NULL)
            done = -1;
        for (Py_ssize_t j = 0; done == 0 && j < PySequence_Fast_GET_SIZE(parameters); j++) {
            PyObject *parameter = Py_NewRef(PySequence_Fast_GET_ITEM(parameters, j));
            done = add_parameter(parameter, with_storage, numbers);
            Py_DECREF(parameter);
        }
        Py_XDECREF(parameters);
    }
    Py_DECREF(groups);
    return done;
}

/* A tuple of the given objects, which are given away; NULL with an exception where one of them is NULL. */
static PyObject *tuple_of(PyObject **items, Py_ssize_t count)
{
    PyObject *found = NULL;
    Py_ssize_t i = 0;
    while (i < count && items[i] != NULL)
        i++;
    if (i == count)
        found = PyTuple_New(count);
    for (i = 0; i < count; i++)
        if (found != NULL)
            PyTuple_SET_ITEM(found, i, items[i]);
        else
            Py_XDECREF(items[i]);
    return found;
}

/* The name of an object's class as its ``__name__`` has it. */
static PyObject *class_name(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        return Py_NewRef(((PyHeapTypeObject *)type)->ht_name);
    return PyObject_GetAttrString((PyObject *)type, "__name__");
}

/* Puts a step into the log; -1 with an exception. */
static int log_step(Core *core, PyObject *optimizer, int begins, long long clock)
{
    LoggedStep step = {.clock = clock, .steps = core->steps, .optimizer = optimizer}, dropped;
    start_numbers(&step.numbers);
    LoggedStep *place = NULL;
    PyObject *before = hush(NULL);
    int is_good = add_parameters(optimizer, begins, &step.numbers) == 0;
    unhush(before);
    if (is_good && (!begins || ((step.stack = stack_here(core, 0)) != NULL && (step.name = class_name(optimizer)) != NULL))) {
        step.sequence = sequence_here();
        place = ring_push(&core->step_log, sizeof step, STEPS_KEPT, &dropped);
    }
    if (place == NULL) {
        drop_step(&step);
        return -1;
    }
    *place = step;
    drop_step(&dropped);
    return 0;
}

/* The tuple of a logged step. What is logged may change while it is made: an allocation can run the program's code. */
static PyObject *step_as_tuple(LoggedStep *logged)
{
    long long clock = logged->clock, steps = logged->steps, sequence = logged->sequence;
    PyObject *name = Py_XNewRef(logged->name), *stack = Py_XNewRef(logged->stack), *fields = NULL;
    PyObject *number = PyLong_FromVoidPtr(logged->optimizer);
    int each = name == NULL ? 1 : 2;
    PyObject *storages = as_bytes(&logged->numbers, 0, each), *versions = as_bytes(&logged->numbers, each - 1, each);
    if (number != NULL && storages != NULL && versions != NULL)
        fields = name == NULL ? Py_BuildValue("sLOOL", "end", clock, number, versions, sequence)
                              : Py_BuildValue("sLLOOOLOO", "begin", clock, steps, number, name, stack, sequence,
                                              storages, versions);
    Py_XDECREF(name);
    Py_XDECREF(stack);
    Py_XDECREF(number);
    Py_XDECREF(storages);
    Py_XDECREF(versions);
    return fields;
}

/* The logged steps, oldest first, each as the tuple that _core_pure.py says. */
static PyObject *Core_step_log(Core *self, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->step_log.count; i++) {
        size_t place = (self->step_log.first + i) & (self->step_log.capacity - 1);
        PyObject *fields = step_as_tuple((LoggedStep *)self->step_log.items + place);
        if (fields == NULL || PyList_Append(list, fields) < 0)
            Py_CLEAR(list);
        Py_XDECREF(fields);
    }
    return list;
}

/* Notes that a step of `optimizer` has begun, or has ended. */
static int open_step(Core *core, PyObject *optimizer, int begins)
{
    PyObject *number = PyLong_FromVoidPtr(optimizer), *thread = NULL;
    int done = -1;
    if (number != NULL && begins) {
        thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        done = thread == NULL ? -1 : PyDict_SetItem(core->open, number, thread);
    } else if (number != NULL && (done = PyDict_Contains(core->open, number)) > 0)
        done = PyDict_DelItem(core->open, number);
    Py_XDECREF(number);
    Py_XDECREF(thread);
    core->open_steps = PyDict_GET_SIZE(core->open);
    return done < 0 ? forgive(core) : 0;
}

/* Closes the steps of this thread that have raised: those that began, where a backward is called from none. */
static int close_raised_steps(Core *core, Stack *from)
{
    int found = Py_SIZE(from) == DEPTH_KEPT; /* further out there may be one */
    for (Py_ssize_t i = 0; found == 0 && i < Py_SIZE(from); i++)
        found = is_of_optimizers(core, (PyCodeObject *)from->codes[i]);
    if (found != 0)
        return found < 0 ? -1 : 0;
    PyObject *others = PyDict_New(), *number, *thread;
    Py_ssize_t at = 0;
    int done = others == NULL ? -1 : 0;
    while (done == 0 && PyDict_Next(core->open, &at, &number, &thread))
        if (PyLong_AsUnsignedLong(thread) != PyThread_get_thread_ident())
            done = PyDict_SetItem(others, number, thread);
    if (done < 0) {
        Py_XDECREF(others);
        return -1;
    }
    Py_SETREF(core->open, others);
    core->open_steps = PyDict_GET_SIZE(core->open);
    return 0;
}

/* Tells `told` of a step of `optimizer`; None, unless what is told raises. */
static PyObject *tell_step(Core *core, PyObject *told, PyObject *optimizer)
{
    if (!is_set(told))
        Py_RETURN_NONE;
    PyObject *number = PyLong_FromVoidPtr(optimizer);
    int known = number == NULL ? -1 : PySet_Contains(core->settled, number);
    Py_XDECREF(number);
    if (known < 0)
        return NULL;
    if (known > 0)
        Py_RETURN_NONE;
    Py_INCREF(told);
    PyObject *done = PyObject_CallOneArg(told, optimizer);
    Py_DECREF(told);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    Py_RETURN_NONE;
}

static PyObject *Core_step_begin(Core *self, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "step_begin() needs the optimizer");
    long long clock = ++self->clock;
    if (open_step(self, args[0], 1) < 0 || (log_step(self, args[0], 1, clock) < 0 && forgive(self) < 0))
        return NULL;
    return tell_step(self, self->on_step_begin, args[0]);
}

static PyObject *Core_step_end(Core *self, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "step_end() needs the optimizer");
    if (open_step(self, args[0], 0) < 0)
        return NULL;
    self->steps++;
    long long clock = ++self->clock;
    if (log_step(self, args[0], 0, clock) < 0 && forgive(self) < 0)
        return NULL;
    return tell_step(self, self->on_step_end, args[0]);
}

/* Stands in for the function by which backward and grad enter the engine; without a Python frame of its own, so that the
 * program's tracebacks stay as they are. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original, *dictionary;
    Core *core;
} Engine;

static PyTypeObject Engine_Type;

/* What `running` holds of a backward call. */
static PyObject *backward_record(Core *core, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static PyObject *accumulate_name;
    if (accumulate_name == NULL && (accumulate_name = PyUnicode_InternFromString("accumulate_grad")) == NULL)
        return NULL;
    PyObject *accumulate =
        keywords == NULL || PyTuple_GET_SIZE(keywords) == 0 ? NULL : passed_by_keyword(accumulate_name, args + count, keywords);
    PyObject *stack = stack_here(core, 0);
    if (stack == NULL)
        return NULL;
    PyObject *fields[] = {PyLong_FromLongLong(core->clock),
                          stack,
                          PyLong_FromUnsignedLong(PyThread_get_thread_ident()),
                          Py_NewRef(args[0]),
                          Py_NewRef(count > 2 ? args[2] : Py_None),
                          Py_NewRef(accumulate == NULL ? Py_True : accumulate)};
    return tuple_of(fields, sizeof fields / sizeof *fields);
}

/* A weak reference to what a backward starts from; None for what has none (a GradientEdge). */
static PyObject *weak_reference(PyObject *output)
{
    PyObject *weak = PyWeakref_NewRef(output, NULL);
    if (weak == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        weak = Py_NewRef(Py_None);
    }
    return weak;
}

/* The same for each of several, in a tuple; of one alone without a tuple. */
static PyObject *weakly(PyObject *outputs)
{
    if (PyTuple_CheckExact(outputs) && PyTuple_GET_SIZE(outputs) == 1)
        return weak_reference(PyTuple_GET_ITEM(outputs, 0));
    /* A list may change while weak references are made: that can run the program's code. */
    PyObject *items = PySequence_Tuple(outputs);
    PyObject *found = items == NULL ? NULL : PyTuple_New(PyTuple_GET_SIZE(items));
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(found); i++) {
        PyObject *weak = weak_reference(PyTuple_GET_ITEM(items, i));
        if (weak == NULL)
            Py_CLEAR(found);
        else
            PyTuple_SET_ITEM(found, i, weak);
    }
    Py_XDECREF(items);
    return found;
}

static inline LoggedBackward *backward_at(const Ring *ring, size_t i)
{
    return (LoggedBackward *)ring->items + ((ring->first + i) & (ring->capacity - 1));
}

/* Puts the call with this record into `backward_log`; its number there, 0 with an exception. */
static unsigned long long remember_backward(Core *core, PyObject *record, long long clock, long long sequence)
{
    LoggedBackward backward = {.clock = clock,
                               .begun = sequence,
                               .ended = sequence,
                               .steps = core->steps,
                               .life = PyThreadState_GetID(PyThreadState_Get()),
                               .thread = PyThread_get_thread_ident(),
                               .outputs = weakly(PyTuple_GET_ITEM(record, 3))},
                   dropped;
    LoggedBackward *place =
        backward.outputs == NULL ? NULL : ring_push(&core->backward_log, sizeof backward, BACKWARDS_KEPT, &dropped);
    if (place == NULL) {
        Py_XDECREF(backward.outputs);
        return 0;
    }
    backward.stack = Py_NewRef(PyTuple_GET_ITEM(record, 1));
    backward.retain = Py_NewRef(PyTuple_GET_ITEM(record, 4));
    backward.accumulate = Py_NewRef(PyTuple_GET_ITEM(record, 5));
    *place = backward;
    drop_backward(&dropped);
    return ++core->backwards_logged;
}

/* Notes the number of the next Node after a call, and in the log where the call with this number is still there. */
static void end_backward(Core *core, unsigned long long number, long long sequence)
{
    core->quiet_from = core->backward_end = sequence;
    unsigned long long younger = core->backwards_logged - number;
    if (number != 0 && younger < core->backward_log.count)
        backward_at(&core->backward_log, core->backward_log.count - 1 - younger)->ended = sequence;
}

/* The logged calls, oldest first, each as the tuple that _core_pure.py says. */
static PyObject *Core_backward_log(Core *self, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->backward_log.count; i++) {
        /* A copy, because an allocation can run the program's code, and that can change the log. */
        LoggedBackward one = *backward_at(&self->backward_log, i);
        PyObject *held[] = {one.stack, one.retain, one.accumulate, one.outputs};
        for (int k = 0; k < 4; k++)
            Py_INCREF(held[k]);
        PyObject *outputs = PyTuple_CheckExact(one.outputs) ? Py_NewRef(one.outputs) : PyTuple_Pack(1, one.outputs);
        PyObject *fields = NULL;
        if (outputs != NULL)
            fields = Py_BuildValue("LOkOOLLLKO", one.clock, one.stack, one.thread, one.retain, one.accumulate, one.begun,
                                   one.ended, one.steps, one.life, outputs);
        if (fields == NULL || PyList_Append(list, fields) < 0)
            Py_CLEAR(list);
        Py_XDECREF(fields);
        Py_XDECREF(outputs);
        drop_backward(&one);
    }
    return list;
}

/* Counts the call for its line, and tells `on_round` where its number is a power of two. Whether that was told; -1 with an
 * exception. */
static int count_round(Core *core, PyObject *record)
{
    long long rounds = ++((Stack *)PyTuple_GET_ITEM(record, 1))->rounds;
    if ((rounds & (rounds - 1)) != 0 || !is_set(core->on_round))
        return 0;
    PyObject *told = call_held(core->on_round, "(OL)", record, rounds);
    Py_XDECREF(told);
    return told == NULL ? -1 : 1;
}

/* Tells `on_failure` of the exception that is set, which stays set unless what is no Exception comes out of the call. */
static void tell_failure(Core *core, PyObject *record)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *told = call_held(core->on_failure, "(OO)", record, value);
    if (told == NULL && forgive(core) < 0) {
        PyObject *new_type, *new_value, *new_traceback;
        PyErr_Fetch(&new_type, &new_value, &new_traceback);
        PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
        PyException_SetContext(new_value, value); /* takes the reference */
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        PyErr_Restore(new_type, new_value, new_traceback);
        return;
    }
    Py_XDECREF(told);
    PyErr_Restore(type, value, traceback);
}

static void forget_record(Core *core, PyObject *record)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = PyList_GET_SIZE(core->running) - 1; i >= 0; i--)
        if (PyList_GET_ITEM(core->running, i) == record) {
            if (PyList_SetSlice(core->running, i, i + 1, NULL) < 0)
                PyErr_Clear();
            break;
        }
    Py_DECREF(record);
    PyErr_Restore(type, value, traceback);
}

/* Calls `on_enter` with the record, and with the arguments of the engine after the outputs. */
static int tell_entry(Core *core, PyObject *record, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *rest = PyTuple_New(count - 1), *named = PyDict_New();
    int failed = rest == NULL || named == NULL;
    for (Py_ssize_t i = 1; !failed && i < count; i++)
        PyTuple_SET_ITEM(rest, i - 1, Py_NewRef(args[i]));
    Py_ssize_t names = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; !failed && i < names; i++)
        failed = PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[count + i]) < 0;
    if (!failed) {
        PyObject *told = call_held(core->on_enter, "(OOO)", record, rest, named);
        failed = told == NULL;
        Py_XDECREF(told);
    }
    Py_XDECREF(rest);
    Py_XDECREF(named);
    return failed ? -1 : 0;
}

/* Calls `on_differentiable` with the record, the inputs that the engine was given, and its result. */
static int tell_differentiable(Core *core, PyObject *record, PyObject *const *args, Py_ssize_t count, PyObject *result)
{
    PyObject *inputs = count > 4 ? Py_NewRef(args[4]) : PyTuple_New(0);
    if (inputs == NULL)
        return -1;
    PyObject *told = call_held(core->on_differentiable, "(OOO)", record, inputs, result);
    Py_DECREF(inputs);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

static PyObject *Engine_vectorcall(PyObject *self, PyObject *const *args, size_t flagged_count, PyObject *keywords)
{
    Engine *engine = (Engine *)self;
    Core *core = engine->core;
    Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
    if (!core->active || count < 1 || core->running == NULL)
        return PyObject_Vectorcall(engine->original, args, flagged_count, keywords);

    long long clock = ++core->clock;
    core->backwards++;
    PyObject *record = backward_record(core, args, count, keywords);
    if (record == NULL || PyList_Append(core->running, record) < 0) {
        Py_CLEAR(record);
        if (forgive(core) < 0)
            return NULL;
    }
    if (record != NULL && core->open_steps && close_raised_steps(core, (Stack *)PyTuple_GET_ITEM(record, 1)) < 0 &&
        forgive(core) < 0) {
        forget_record(core, record);
        return NULL;
    }
    long long first = sequence_here();
    unsigned long long remembered = 0;
    if (record != NULL) {
        int has_told = -1;
        remembered = remember_backward(core, record, clock, first);
        if ((remembered == 0 && forgive(core) < 0) || (has_told = count_round(core, record)) < 0 ||
            (is_set(core->on_enter) && tell_entry(core, record, args, count, keywords) < 0)) {
            forget_record(core, record);
            return NULL;
        }
        /* What is told may have made Nodes of its own. */
        if (has_told || is_set(core->on_enter))
            first = sequence_here();
    }
    PyObject *result = PyObject_Vectorcall(engine->original, args, flagged_count, keywords);
    if (result == NULL) {
        if (record != NULL && is_set(core->on_failure))
            tell_failure(core, record);
    } else {
        /* Nodes of a backward that is itself differentiable. */
        long long end = sequence_here();
        if (end != first && log_nodes(core, first, end) < 0 && forgive(core) < 0)
            Py_CLEAR(result);
        end_backward(core, remembered, end);
        if (result != NULL && record != NULL && count > 3 && args[3] == Py_True && is_set(core->on_differentiable) &&
            tell_differentiable(core, record, args, count, result) < 0)
            Py_CLEAR(result);
        if (result != NULL && record != NULL && is_set(core->on_leave)) {
            PyObject *told = call_held(core->on_leave, "(O)", record);
            if (told == NULL)
                Py_CLEAR(result);
            Py_XDECREF(told);
        }
    }
    if (record != NULL)
        forget_record(core, record);
    return result;
}

static int Engine_traverse(Engine *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->core);
    Py_VISIT(self->dictionary);
    return 0;
}

static int Engine_clear(Engine *self)
{
    Py_CLEAR(self->dictionary);
    return 0;
}

static void Engine_dealloc(Engine *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->dictionary);
    Py_XDECREF(self->core);
    PyObject_GC_Del(self);
}

static PyGetSetDef Engine_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject Engine_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "gradsan.record._native.Engine",
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_basicsize = sizeof(Engine),
    .tp_vectorcall_offset = offsetof(Engine, vectorcall),
    .tp_dictoffset = offsetof(Engine, dictionary),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = (traverseproc)Engine_traverse,
    .tp_clear = (inquiry)Engine_clear,
    .tp_dealloc = (destructor)Engine_dealloc,
    .tp_getset = Engine_getset,
};

static PyObject *Core_engine(Core *self, PyObject *original)
{
    Engine *engine = PyObject_GC_New(Engine, &Engine_Type);
    if (engine == NULL)
        return NULL;
    engine->vectorcall = Engine_vectorcall;
    engine->original = Py_NewRef(original);
    engine->dictionary = NULL;
    engine->core = (Core *)Py_NewRef((PyObject *)self);
    PyObject_GC_Track(engine);
    PyObject *dressed = PyObject_CallFunctionObjArgs(torch.dress, engine, original, NULL);
    Py_DECREF(engine);
    return dressed;
}

/* ---- the type Core and the module ------------------------------------------------------------------------------- */

static PyObject *Core_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Core", names) || find_torch() < 0)
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
    Py_VISIT(self->on_leave);
    Py_VISIT(self->on_result);
    Py_VISIT(self->on_nodes);
    Py_VISIT(self->on_quiet);
    Py_VISIT(self->on_write);
    Py_VISIT(self->before_write);
    Py_VISIT(self->lets_pass);
    Py_VISIT(self->on_round);
    Py_VISIT(self->on_differentiable);
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
    Py_CLEAR(self->on_leave);
    Py_CLEAR(self->on_result);
    Py_CLEAR(self->on_nodes);
    Py_CLEAR(self->on_quiet);
    Py_CLEAR(self->on_write);
    Py_CLEAR(self->before_write);
    Py_CLEAR(self->lets_pass);
    Py_CLEAR(self->on_round);
    Py_CLEAR(self->on_differentiable);
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
     "stack($self, skip=0)\n--\n\nThe stack of the caller (skip frames further out), equal stacks being one object."},
    {"nodes_near", (PyCFunction)(void (*)(void))Core_nodes_near, METH_FASTCALL,
     "nodes_near($self, sequence, thread, /)\n--\n\nThe call that made a Node, else the calls before and after it."},
    {"ran_since", (PyCFunction)(void (*)(void))Core_ran_since, METH_FASTCALL,
     "ran_since($self, stack, sequence, thread, /)\n--\n\nWhether the call at a stack made Nodes again since."},
    {"writes", (PyCFunction)Core_writes, METH_NOARGS, "writes($self, /)\n--\n\nThe logged writes, oldest first."},
    {"writes_after", (PyCFunction)Core_writes_after, METH_O,
     "writes_after($self, clock, /)\n--\n\nThose of the logged writes that are younger, oldest first."},
    {"lost_writes_after", (PyCFunction)Core_lost_writes_after, METH_O,
     "lost_writes_after($self, clock, /)\n--\n\nWhether the bounded log may have dropped a write younger than clock."},
    {"log_write", (PyCFunction)(void (*)(void))Core_log_write, METH_FASTCALL | METH_KEYWORDS,
     "log_write($self, tensor, op, kind, index, stack)\n--\n\nPut one in-place change of tensor into the log."},
    {"writer", (PyCFunction)(void (*)(void))Core_writer, METH_FASTCALL | METH_KEYWORDS,
     "writer($self, original, op, kind, position, keyword)\n--\n\n"
     "Wrap original so that what it writes is logged after it returned."},
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
    {"log_errors", T_LONGLONG, offsetof(Core, log_errors), 0, NULL},
    {"backwards", T_LONGLONG, offsetof(Core, backwards), 0, NULL},
    {"backward_end", T_LONGLONG, offsetof(Core, backward_end), 0, NULL},
    {"quiet_from", T_LONGLONG, offsetof(Core, quiet_from), 0, NULL},
    {"quiet_nodes", T_LONGLONG, offsetof(Core, quiet_nodes), 0, NULL},
    {"on_failure", T_OBJECT, offsetof(Core, on_failure), 0, NULL},
    {"on_enter", T_OBJECT, offsetof(Core, on_enter), 0, NULL},
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

/* ---- memory lent to kernels ------------------------------------------------------------------------------------- */

/* What DLPack calls a managed tensor: the layout is that of its ABI, which torch reads. */
typedef struct Lent {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *owner;
    void (*give_back)(struct Lent *);
    int64_t sizes[]; /* shape, then strides */
} Lent;

enum { DEVICE_CPU = 1 };

static void Lent_give_back(Lent *lent)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)lent->owner);
        PyGILState_Release(state);
    }
    free(lent);
}

static void capsule_gone(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) /* nobody has taken it */
        Lent_give_back((Lent *)PyCapsule_GetPointer(capsule, "dltensor"));
}

static int read_sizes(PyObject *tuple, Py_ssize_t count, int64_t *into)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
        PyErr_SetString(PyExc_TypeError, "expected one size and one stride for each dimension");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (into[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *lend(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "lend() takes an address, shape, strides, code, bits and owner");
        return NULL;
    }
    Py_ssize_t ndim = PyTuple_Check(args[1]) ? PyTuple_GET_SIZE(args[1]) : 0;
    Lent *lent = (Lent *)calloc(1, sizeof(Lent) + 2 * (size_t)ndim * sizeof(int64_t));
    if (lent == NULL)
        return PyErr_NoMemory();
    lent->data = PyLong_AsVoidPtr(args[0]);
    lent->device.type = DEVICE_CPU;
    lent->ndim = (int32_t)ndim;
    lent->shape = lent->sizes;
    lent->strides = lent->sizes + ndim;
    lent->dtype.code = (uint8_t)PyLong_AsLong(args[3]);
    lent->dtype.bits = (uint8_t)PyLong_AsLong(args[4]);
    lent->dtype.lanes = 1;
    lent->give_back = Lent_give_back;
    if (PyErr_Occurred() || read_sizes(args[1], ndim, lent->shape) < 0 || read_sizes(args[2], ndim, lent->strides) < 0) {
        free(lent);
        return NULL;
    }
    lent->owner = Py_NewRef(args[5]);
    PyObject *capsule = PyCapsule_New(lent, "dltensor", capsule_gone);
    if (capsule == NULL)
        Lent_give_back(lent);
    return capsule;
}

static PyMethodDef functions[] = {
    {"first_nonfinite", (PyCFunction)(void (*)(void))first_nonfinite, METH_FASTCALL,
     "The index of the first NaN or Inf among numbers in memory: (address, count, kind); -1 where there is none."},
    {"lend", (PyCFunction)(void (*)(void))lend, METH_FASTCALL,
     "lend(address, shape, strides, code, bits, owner, /)\n--\n\nA DLPack capsule over memory that owner holds."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "gradsan.record._native", .m_doc = "The recording core in C.", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&Stack_Type) < 0 || PyType_Ready(&MethodWriter_Type) < 0 || PyType_Ready(&FunctionWriter_Type) < 0 || PyType_Ready(&Engine_Type) < 0 || PyType_Ready(&Core_Type) < 0 ||
        PyDict_SetItemString(Core_Type.tp_dict, "is_native", Py_True) < 0)
        return NULL;
    PyType_Modified(&Core_Type);
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Core", (PyObject *)&Core_Type) < 0 ||
        PyModule_AddObjectRef(module, "Stack", (PyObject *)&Stack_Type) < 0 ||
        PyModule_AddIntMacro(module, WRITES_KEPT) < 0 || PyModule_AddIntMacro(module, NODES_KEPT) < 0 ||
        PyModule_AddIntMacro(module, STACKS_KEPT) < 0 || PyModule_AddIntMacro(module, DEPTH_KEPT) < 0 ||
        PyModule_AddIntMacro(module, STEPS_KEPT) < 0 || PyModule_AddIntMacro(module, BACKWARDS_KEPT) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
