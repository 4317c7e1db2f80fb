/* Calls of gradsan's own Python code, without the program's tracers, limits and signals. Part of _native.c, which includes it once: one unit to compile. */

/* ---- own code ------------------------------------------------------------------------------------------------------ */

static int is_set(PyObject *callback)
{
    return callback != NULL && callback != Py_None;
}

/* The frames that gradsan's own code may use when the program has used up its recursion limit. */
#define OWN_DEPTH 200

#if defined(SIGNALS_CAN_WAIT) && PY_VERSION_HEX < 0x030D0000
static int wake_for_signals(void *Py_UNUSED(nothing))
{
    return 0;
}
#endif

/* How many calls of gradsan's own code this thread is in: torch functions that it calls are not the program's. */
#ifdef _MSC_VER
static __declspec(thread) int own_calls;
#else
static _Thread_local int own_calls;
#endif

/* State that leave_own_code() restores. */
typedef struct {
    PyThreadState *thread;
    int collects, keeps_signals;
} OwnCode;

/* While gradsan's own Python code runs, the program's tracers and profilers are off, and its recursion limit does not
 * count. None of the program's own code runs in between, under modes that are not its own: garbage collection and
 * signal handlers, which the interpreter runs in what it takes for the main thread, are postponed. */
static inline OwnCode enter_own_code(void)
{
    PyThreadState *thread = PyThreadState_Get();
    OwnCode code = {thread, PyGC_Disable(), 0};
    own_calls++;
#if PY_VERSION_HEX >= 0x030C0000
    PyThreadState_EnterTracing(thread);
    thread->py_recursion_remaining += OWN_DEPTH;
#elif PY_VERSION_HEX >= 0x030B0000
    PyThreadState_EnterTracing(thread);
    thread->recursion_remaining += OWN_DEPTH;
#else
    thread->tracing++;
    thread->recursion_depth -= OWN_DEPTH;
#endif
#ifdef SIGNALS_CAN_WAIT
    if (_PyRuntime.main_thread == PyThread_get_thread_ident()) {
        _PyRuntime.main_thread = 0;
        code.keeps_signals = 1;
    }
#endif
    return code;
}

static inline void leave_own_code(OwnCode code)
{
    PyThreadState *thread = code.thread;
    own_calls--;
#ifdef SIGNALS_CAN_WAIT
    if (code.keeps_signals) {
        _PyRuntime.main_thread = PyThread_get_thread_ident();
#if PY_VERSION_HEX < 0x030D0000
        /* The interpreter has checked meanwhile, and found nothing to do. */
        if (_Py_atomic_load_relaxed(&_PyRuntime.ceval.signals_pending))
            Py_AddPendingCall(wake_for_signals, NULL);
#endif
    }
#endif
#if PY_VERSION_HEX >= 0x030C0000
    thread->py_recursion_remaining -= OWN_DEPTH;
    PyThreadState_LeaveTracing(thread);
#elif PY_VERSION_HEX >= 0x030B0000
    thread->recursion_remaining -= OWN_DEPTH;
    PyThreadState_LeaveTracing(thread);
#else
    thread->recursion_depth += OWN_DEPTH;
    thread->tracing--;
#endif
    if (code.collects)
        PyGC_Enable();
}

/* The location of a thread's current frame in CPython. */
#if PY_VERSION_HEX < 0x030B0000
#define RUNNING_FRAME(thread) ((thread)->frame)
typedef PyFrameObject *RunningFrame;
#elif PY_VERSION_HEX < 0x030D0000
#define RUNNING_FRAME(thread) ((thread)->cframe->current_frame)
typedef struct _PyInterpreterFrame *RunningFrame;
#elif PY_VERSION_HEX < 0x030E0000
#define RUNNING_FRAME(thread) ((thread)->current_frame)
typedef struct _PyInterpreterFrame *RunningFrame;
#endif

/* Calls a function like the first one of a thread: its stack ends with its own frames, and it has the full recursion
 * depth. */
static PyObject *call_alone(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "call_alone() needs a function");
#ifdef RUNNING_FRAME
    PyThreadState *thread = PyThreadState_Get();
    RunningFrame below = RUNNING_FRAME(thread);
    RUNNING_FRAME(thread) = NULL;
#if PY_VERSION_HEX >= 0x030C0000
    int used = thread->py_recursion_limit - thread->py_recursion_remaining;
    thread->py_recursion_remaining += used;
#elif PY_VERSION_HEX >= 0x030B0000
    /* A C function, which itself only calls the first Python function, counts as one more. */
    int used = thread->recursion_limit - thread->recursion_remaining + (PyCFunction_Check(args[0]) ? 1 : 0);
    thread->recursion_remaining += used;
#endif
#endif
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)count - 1, NULL);
#ifdef RUNNING_FRAME
    RUNNING_FRAME(thread) = below;
#if PY_VERSION_HEX >= 0x030C0000
    thread->py_recursion_remaining -= used;
#elif PY_VERSION_HEX >= 0x030B0000
    thread->recursion_remaining -= used;
#endif
#endif
    return result;
}

/* Calls a listener; the caller holds a reference. An exception of a signal handler may come between two lines of a
 * context manager of ours: modes that it has changed are restored, however the call ends. */
static PyObject *call_listener(PyObject *callback, PyObject *arguments)
{
    OwnCode code = enter_own_code();
    PyObject *state = PyObject_Vectorcall(torch.function_state, NULL, 0, NULL);
    PyObject *records = state == NULL ? NULL : PyObject_Vectorcall(torch.is_grad_enabled, NULL, 0, NULL);
    PyObject *result = records == NULL ? NULL : PyObject_CallObject(callback, arguments);
    if (result == NULL && records != NULL) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *done = PyObject_CallFunctionObjArgs(torch.put_modes_back, state, records, NULL);
        if (done == NULL)
            PyErr_Clear();
        Py_XDECREF(done);
        PyErr_Restore(type, value, traceback);
    }
    leave_own_code(code);
    Py_XDECREF(state);
    Py_XDECREF(records);
    return result;
}

/* Calls a function as gradsan's own: a hook that the engine calls. */
static PyObject *call_own(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "call_own() needs a function");
    if (find_torch() < 0)
        return NULL;
    PyObject *arguments = PyTuple_New(count - 1);
    for (Py_ssize_t i = 1; arguments != NULL && i < count; i++)
        PyTuple_SET_ITEM(arguments, i - 1, Py_NewRef(args[i]));
    PyObject *result = arguments == NULL ? NULL : call_listener(args[0], arguments);
    Py_XDECREF(arguments);
    return result;
}

/* Calls a callback with arguments in the format of Py_BuildValue, as a tuple; it may be replaced or removed, by itself
 * or by another thread. Does nothing if it is None. */
static PyObject *call_held(PyObject *callback, const char *format, ...)
{
    if (!is_set(callback))
        Py_RETURN_NONE;
    va_list given;
    Py_INCREF(callback);
    va_start(given, format);
    PyObject *arguments = Py_VaBuildValue(format, given);
    va_end(given);
    PyObject *result = arguments == NULL ? NULL : call_listener(callback, arguments);
    Py_XDECREF(arguments);
    Py_DECREF(callback);
    return result;
}
