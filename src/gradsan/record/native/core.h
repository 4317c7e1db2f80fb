/* The object Core: its logs, the stack of a call, and the metadata of a written tensor. Part of _native.c, which includes it once: one unit to compile. */

/* ---- Core ------------------------------------------------------------------------------------------------------- */

#define QUIET_NODES 1024

typedef struct {
    PyObject_HEAD
    char active;
    long long open_steps, step_changes, clock, saves;
    PyObject *open; /* the thread of each open step, by the optimizer's id; no counter, as a step that raised begins again */
    PyObject *optimizer_code; /* the function of torch's optimizers that called last */
    Ring nodes, writes, step_log, backward_log;
    unsigned long long backwards_logged;
    long long write_count, steps, log_errors, backwards, backward_end;
    long long quiet_nodes, quiet_from; /* the Nodes from quiet_from on at which `on_quiet` is called */
    PyObject *optimizer_folder;
    PyObject *running; /* a list of the running backward calls */
    PyObject *settled; /* the ids of the optimizers whose steps need no callback any more; a set */
    PyObject *on_failure; /* called with a record of `running` and the exception that ended it */
    PyObject *on_enter;   /* called with a record of `running` and the engine's other arguments, before it runs */
    PyObject *on_nonfinite; /* called with a record of `running` whose outputs are not known to be finite, before it runs */
    PyObject *on_leave;   /* called with a record of `running` whose backward has succeeded */
    PyObject *on_round;   /* called with a record of `running` at the 1st, 2nd, 4th, 8th ... call of one line, and that number */
    PyObject *on_differentiable; /* called with a record of `running`, inputs and result, after a call with create_graph */
    PyObject *on_gradients; /* likewise after a call that fills no .grad, without create_graph */
    PyObject *quiet_operators; /* the ids of operators that write nothing; a set */
    PyObject *on_operator;     /* called with the positional (first the operator) and the named arguments of a call */
    PyObject *on_step_begin, *on_step_end; /* called with an optimizer that is not in `settled` */
    PyObject *on_result;  /* called with the name, the arguments and the result of each call */
    PyObject *on_nodes;   /* called with an object holding the Nodes that a call has made, the first number and the end */
    PyObject *on_quiet;   /* called with the number of the next Node when `quiet_nodes` are reached */
    PyObject *on_write;   /* called while a backward runs with a written tensor, the operation, and the stack */
    PyObject *before_write; /* called with the tensors that are about to be written */
    char tells_all_writes; /* on_write is called at any time */
    PyObject *lets_pass;   /* exceptions of this class propagate from callbacks to the program; NULL, None: none */
    Stack **stacks; /* open addressing; capacity is 0 or a power of two, at most half full */
    size_t stack_capacity, stack_count;
} Core;

static PyTypeObject Core_Type;

/* Clearing runs foreign code (a code object can have weak references), so a log is detached before it is released. */
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

/* The slot in the table for the stack with these frames, or the free slot where it belongs. The table is never full. */
static inline Stack **place_of(Core *core, PyObject *const *codes, const int *lastis, Py_ssize_t depth, uint64_t hash)
{
    size_t mask = core->stack_capacity - 1, place = hash & mask;
    for (Stack *known; (known = core->stacks[place]) != NULL; place = (place + 1) & mask)
        if (known->hash == hash && Py_SIZE(known) == depth && !memcmp(known->codes, codes, depth * sizeof *codes) &&
            !memcmp(lastis_of(known), lastis, depth * sizeof *lastis))
            break;
    return core->stacks + place;
}

/* Collects the code objects and offsets of the current frames, innermost first, without the first `skip`; returns their
 * number, -1 with an exception. The code objects are borrowed: the frames are suspended below this call and keep them
 * alive. */
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

/* The code object of the current Python frame, borrowed from it; NULL if there is none. */
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

/* The current Python stack, `skip` frames further out: a new reference; equal stacks are one object. It is empty if no
 * Python frame is left (in a hook called in a thread of the engine). */
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

/* Puts the arguments `names` into `given`, whether passed by position or by keyword, NULL for missing ones. */
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
    self->step_changes++;
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

/* The number of the next Node of this thread; 0 if torch does not provide it. */
static inline long long sequence_here(void)
{
    if (torch.peek_sequence != NULL)
        return (long long)torch.peek_sequence();
    long long number = integer(PyObject_Vectorcall(torch.sequence_number, NULL, 0, NULL));
    if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return number;
}

static PyObject *Core_nodes_near(Core *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "nodes_near() needs a sequence number and a thread");
    long long sequence = PyLong_AsLongLong(args[0]);
    unsigned long thread = PyLong_AsUnsignedLongMask(args[1]);
    if (PyErr_Occurred())
        return NULL;
    /* The ident of an ended thread is reused by another, whose numbers restart. */
    long long made = thread == PyThread_get_thread_ident() ? sequence_here() : LLONG_MAX;
    LoggedNodes *exact = NULL, *before = NULL, *after = NULL;
    /* Newest first. In the calling thread ends only rise: entries before the first one that ends earlier are older. */
    for (size_t i = self->nodes.count; i-- > 0;) {
        LoggedNodes *nodes = nodes_at(&self->nodes, i);
        if (nodes->thread != thread || nodes->end > made)
            continue;
        if (nodes->first <= sequence && sequence < nodes->end) {
            /* Of nested calls the innermost one made the Node. */
            if (exact == NULL || nodes->end - nodes->first < exact->end - exact->first)
                exact = nodes;
        } else if (nodes->end <= sequence) {
            if (before == NULL || nodes->end > before->end)
                before = nodes;
            if (made != LLONG_MAX)
                break;
        } else if (after == NULL || nodes->first <= after->first)
            after = nodes;
    }
    /* Copied before any allocation, which can run the program's code, which can log and move the entries. */
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

/* The logged writes younger than the clock `after`, oldest first. They are copied first: an allocation can run any
 * code. */
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

/* The integer of an exact int (steals the reference); -1 with an exception otherwise. A symbolic integer is rejected
 * rather than evaluated, which would add a guard to the trace. */
static long long plain_integer(PyObject *given)
{
    if (given != NULL && !PyLong_CheckExact(given)) {
        PyErr_Format(PyExc_TypeError, "expected an int, not %.80s", Py_TYPE(given)->tp_name);
        Py_CLEAR(given);
    }
    return integer(given);
}

/* Storage, version and geometry of an ordinary tensor; -1 with an exception if it has none of them. */
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

/* The same after an ordinary tensor's way has failed with a RuntimeError or AttributeError. */
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

/* Whether a tensor just written is a leaf that requires grad; -1 with an exception. A view of a base with a graph is
 * none, and is not asked for is_leaf: PyTorch would renew its grad_fn, and then allow writes that it would refuse. */
static int is_updated_leaf(PyObject *tensor)
{
    int flag = truth(attribute(tensor, REQUIRES_GRAD));
    if (flag <= 0)
        return flag;
    PyObject *base = attribute(tensor, BASE);
    flag = base == NULL ? -1 : base == Py_None ? 0 : truth(attribute(base, REQUIRES_GRAD));
    Py_XDECREF(base);
    return flag == 0 ? truth(attribute(tensor, IS_LEAF)) : flag < 0 ? -1 : 0;
}

static int log_write_hushed(Core *core, PyObject *tensor, PyObject *op, PyObject *kind, PyObject *index, PyObject *stack)
{
    LoggedWrite write = {0}, dropped;
    PyObject **r = write.references;
    /* A tensor subclass may run code of the program's when its sizes are read; torch.jit.trace records the read. */
    if (!is_plain(tensor) || truth(PyObject_Vectorcall(torch.is_tracing, NULL, 0, NULL)) != 0) {
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

    write.sequence = sequence_here();
    if (write.sequence == -1 && PyErr_Occurred())
        goto failed;
    int flag = truth(PyObject_Vectorcall(torch.is_grad_enabled, NULL, 0, NULL));
    if (flag < 0)
        goto failed;
    write.grad_enabled = (char)flag;
    if ((flag = is_updated_leaf(tensor)) < 0) {
        /* A view made under no_grad whose base was then written refuses to return its grad_fn; it is no leaf. */
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
    /* References must not be released with an exception set. */
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
    PyObject *returned = call_held(core->on_write, "(OOO)", tensor, op, stack);
    Py_XDECREF(returned);
    return returned == NULL ? -1 : 0;
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
