/* Steps of optimizers, and calls of the autograd engine. Part of _native.c, which includes it once: one unit to compile. */

/* ---- steps and backward calls ----------------------------------------------------------------------------------- */

/* Appends the identity of a parameter's storage if requested, and its version; -1 with an exception. */
static int add_parameter(PyObject *parameter, int with_storage, Numbers *numbers)
{
    long long number;
    if (with_storage) {
        number = integer(storage_identity(parameter));
        if (number == -1 && PyErr_Occurred()) {
            /* No ordinary storage (sparse): its steps are then only in the log of writes. */
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
    /* Sizes are read again each time: a tensor subclass may run Python code that changes the lists. */
    for (Py_ssize_t i = 0; done == 0 && i < PySequence_Fast_GET_SIZE(groups); i++) {
        PyObject *group = Py_NewRef(PySequence_Fast_GET_ITEM(groups, i));
        given = PyObject_GetItem(group, params_name);
        Py_DECREF(group);
        PyObject *parameters = given == NULL ? NULL : PySequence_Fast(given, "params cannot be iterated");
        Py_XDECREF(given);
        if (parameters == NULL ||
            reserve_numbers(numbers, PySequence_Fast_GET_SIZE(parameters) * (with_storage ? 2 : 1)) < 0)
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

/* A tuple of the given objects (steals the references); NULL with an exception if one of them is NULL. */
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

/* The ``__name__`` of an object's class. */
static PyObject *class_name(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE))
        return Py_NewRef(((PyHeapTypeObject *)type)->ht_name);
    return PyObject_GetAttrString((PyObject *)type, "__name__");
}

/* Logs a step; -1 with an exception. */
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

/* The tuple of a logged step. The log may change meanwhile: an allocation can run the program's code. */
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

/* The logged steps, oldest first, each as the tuple documented in _core_pure.py. */
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

/* Logs that a step of `optimizer` has begun, or has ended. */
static int open_step(Core *core, PyObject *optimizer, int begins)
{
    PyObject *number = PyLong_FromVoidPtr(optimizer), *thread = NULL;
    int done = -1;
    core->step_changes++;
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

/* Closes the steps of this thread that have raised: all open ones, if a backward is called from outside any step. */
static int close_raised_steps(Core *core, Stack *from)
{
    int found = Py_SIZE(from) == DEPTH_KEPT; /* there may be one further out */
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

/* Calls `listener` with the optimizer of a step; returns None, unless it raises. */
static PyObject *notify_step(Core *core, PyObject *listener, PyObject *optimizer)
{
    if (!is_set(listener))
        Py_RETURN_NONE;
    PyObject *number = PyLong_FromVoidPtr(optimizer);
    int known = number == NULL ? -1 : PySet_Contains(core->settled, number);
    Py_XDECREF(number);
    if (known < 0)
        return NULL;
    if (known > 0)
        Py_RETURN_NONE;
    PyObject *done = call_held(listener, "(O)", optimizer);
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
    return notify_step(self, self->on_step_begin, args[0]);
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
    return notify_step(self, self->on_step_end, args[0]);
}

/* Replaces the function by which backward and grad enter the engine; without a Python frame of its own, so that the
 * program's tracebacks are unchanged. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original, *dictionary;
    Core *core;
} Engine;

static PyTypeObject Engine_Type;

/* The entry of a backward call in `running`. */
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

/* A weak reference to an output of a backward; None for an object without them (a GradientEdge). */
static PyObject *weak_reference(PyObject *output)
{
    PyObject *weak = PyWeakref_NewRef(output, NULL);
    if (weak == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        weak = Py_NewRef(Py_None);
    }
    return weak;
}

/* Weak references to several outputs, as a tuple; to a single one without a tuple. */
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

/* Logs the call with this record in `backward_log`; returns its number there, 0 with an exception. */
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

/* Stores the number of the next Node after a call, also in its log entry if that still exists. */
static void end_backward(Core *core, unsigned long long number, long long sequence)
{
    core->quiet_from = core->backward_end = sequence;
    unsigned long long younger = core->backwards_logged - number;
    if (number != 0 && younger < core->backward_log.count)
        backward_at(&core->backward_log, core->backward_log.count - 1 - younger)->ended = sequence;
}

/* The logged calls, oldest first, each as the tuple documented in _core_pure.py. */
static PyObject *Core_backward_log(Core *self, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->backward_log.count; i++) {
        /* A copy, because an allocation can run the program's code, which can change the log. */
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

/* Counts the call for its line, and calls `on_round` if the count is a power of two. Returns whether it did; -1 with an
 * exception. */
static int count_round(Core *core, PyObject *record)
{
    long long rounds = ++((Stack *)PyTuple_GET_ITEM(record, 1))->rounds;
    if ((rounds & (rounds - 1)) != 0 || !is_set(core->on_round))
        return 0;
    PyObject *returned = call_held(core->on_round, "(OL)", record, rounds);
    Py_XDECREF(returned);
    return returned == NULL ? -1 : 1;
}

/* Calls `on_failure` with the current exception, which stays set unless the callback raises anything but an Exception. */
static void notify_failure(Core *core, PyObject *record)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *returned = call_held(core->on_failure, "(OO)", record, value);
    if (returned == NULL && forgive(core) < 0) {
        PyObject *new_type, *new_value, *new_traceback;
        PyErr_Fetch(&new_type, &new_value, &new_traceback);
        PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
        PyException_SetContext(new_value, value); /* steals the reference */
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        PyErr_Restore(new_type, new_value, new_traceback);
        return;
    }
    Py_XDECREF(returned);
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

/* Calls `on_enter` with the record, and the engine's arguments after the outputs. */
static int notify_entry(Core *core, PyObject *record, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *rest = PyTuple_New(count - 1), *named = PyDict_New();
    int failed = rest == NULL || named == NULL;
    for (Py_ssize_t i = 1; !failed && i < count; i++)
        PyTuple_SET_ITEM(rest, i - 1, Py_NewRef(args[i]));
    Py_ssize_t names = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; !failed && i < names; i++)
        failed = PyDict_SetItem(named, PyTuple_GET_ITEM(keywords, i), args[count + i]) < 0;
    if (!failed) {
        PyObject *returned = call_held(core->on_enter, "(OOO)", record, rest, named);
        failed = returned == NULL;
        Py_XDECREF(returned);
    }
    Py_XDECREF(rest);
    Py_XDECREF(named);
    return failed ? -1 : 0;
}

/* Calls `on_nonfinite` with the record of a call whose outputs are not known to be finite. */
static int notify_nonfinite(Core *core, PyObject *record)
{
    if (!is_set(core->on_nonfinite) || starts_finite(PyTuple_GET_ITEM(record, 3)))
        return 0;
    PyObject *returned = call_held(core->on_nonfinite, "(O)", record);
    Py_XDECREF(returned);
    return returned == NULL ? -1 : 0;
}

/* Calls `on_differentiable` or `on_gradients` with the record, the engine's inputs, and its result. */
static int notify_gradients(PyObject *listener, PyObject *record, PyObject *const *args, Py_ssize_t count, PyObject *result)
{
    PyObject *inputs = count > 4 ? Py_NewRef(args[4]) : PyTuple_New(0);
    if (inputs == NULL)
        return -1;
    PyObject *returned = call_held(listener, "(OOO)", record, inputs, result);
    Py_DECREF(inputs);
    Py_XDECREF(returned);
    return returned == NULL ? -1 : 0;
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
            notify_nonfinite(core, record) < 0 ||
            (is_set(core->on_enter) && notify_entry(core, record, args, count, keywords) < 0)) {
            forget_record(core, record);
            return NULL;
        }
        /* A callback may have made Nodes of its own. */
        if (has_told || is_set(core->on_enter))
            first = sequence_here();
    }
    PyObject *result = PyObject_Vectorcall(engine->original, args, flagged_count, keywords);
    if (result == NULL) {
        if (record != NULL && is_set(core->on_failure))
            notify_failure(core, record);
    } else {
        /* Nodes made by a backward that is itself differentiable. */
        long long end = sequence_here();
        if (end != first && log_nodes(core, first, end) < 0 && forgive(core) < 0)
            Py_CLEAR(result);
        end_backward(core, remembered, end);
        int has_graph = count > 3 && args[3] == Py_True;
        PyObject *listener = has_graph ? core->on_differentiable : core->on_gradients;
        if (result != NULL && record != NULL && is_set(listener) &&
            (has_graph || PyTuple_GET_ITEM(record, 5) == Py_False) &&
            notify_gradients(listener, record, args, count, result) < 0)
            Py_CLEAR(result);
        if (result != NULL && record != NULL && is_set(core->on_leave)) {
            PyObject *returned = call_held(core->on_leave, "(O)", record);
            if (returned == NULL)
                Py_CLEAR(result);
            Py_XDECREF(returned);
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
    PyObject *wrapper = PyObject_CallFunctionObjArgs(torch.dress, engine, original, NULL);
    Py_DECREF(engine);
    return wrapper;
}
