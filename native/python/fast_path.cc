#include "python/fast_path.h"

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "python/call_words.h"

namespace nb = nanobind;

namespace hetcoll {
namespace {

struct FastPath {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;    // the method as it is written in Python
  PyObject* collective;  // an int
  PyObject* op;          // what a call without one means
  Py_ssize_t least;      // positional arguments, `self` among them, that the fast path understands
  Py_ssize_t most;
  bool exchanges;  // self, sendbuf, dest, recvbuf, source
};

PyObject* g_call;  // "_call"

FastPath* Of(PyObject* object) { return reinterpret_cast<FastPath*>(object); }

// What `_call` gives; None where there is nothing to call it with.
PyObject* Short(const FastPath& method, PyObject* const* args, Py_ssize_t given) {
  const std::int32_t root = method.exchanges ? RanksKey(args[2], args[4]) : 0;
  if (root < 0) return Py_NewRef(Py_None);
  PyObject* recv = method.exchanges ? args[3] : given > 2 ? args[2] : Py_None;
  PyObject* op = !method.exchanges && given > 3 ? args[3] : method.op;
  const nb::object where = nb::steal(PyLong_FromLong(root));
  const nb::object call = nb::steal(PyObject_GetAttr(args[0], g_call));
  if (!where.is_valid() || !call.is_valid()) return nullptr;
  PyObject* const words[] = {nullptr, method.collective, args[1], recv, op, where.ptr()};
  constexpr std::size_t kWords = std::size(words) - 1;
  return PyObject_Vectorcall(call.ptr(), words + 1, kWords | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// args: self, sendbuf, recvbuf, op, or those of an exchange. Anything else, and what the fast path leaves alone, is for
// the Python method.
PyObject* Call(PyObject* object, PyObject* const* args, std::size_t flags, PyObject* names) {
  const FastPath& method = *Of(object);
  const Py_ssize_t given = PyVectorcall_NARGS(flags);
  if (names == nullptr && given >= method.least && given <= method.most) {
    PyObject* done = Short(method, args, given);
    if (done != Py_None) return done;  // also where it raised
    Py_DECREF(done);
  }
  return PyObject_Vectorcall(method.function, args, flags, names);
}

PyObject* Bind(PyObject* object, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(object) : PyMethod_New(object, instance);
}

// What people and inspect.signature ask for is the Python method's.
PyObject* Attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(object, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(Of(object)->function, name);
}

PyObject* Doc(PyObject* object, void*) { return PyObject_GetAttrString(Of(object)->function, "__doc__"); }

int Traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Of(object)->function);
  Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  return 0;
}

int Clear(PyObject* object) {
  Py_CLEAR(Of(object)->function);
  return 0;
}

void Delete(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Py_CLEAR(Of(object)->function);
  Py_CLEAR(Of(object)->collective);
  Py_CLEAR(Of(object)->op);
  type->tp_free(object);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPath, call), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(FastPath, function), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef g_properties[] = {{"__doc__", Doc, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot g_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(Bind)},
    {Py_tp_getattro, reinterpret_cast<void*>(Attribute)},
    {Py_tp_traverse, reinterpret_cast<void*>(Traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Delete)},
    {Py_tp_members, g_members},
    {Py_tp_getset, g_properties},
    {0, nullptr},
};
PyType_Spec g_spec = {
    "hetcoll._native.FastPath", sizeof(FastPath), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, g_slots};

nb::object Make(nb::handle type, nb::handle function, int collective, nb::handle op, Py_ssize_t least, Py_ssize_t most,
                bool exchanges) {
  nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type.ptr()), 0));
  if (!made.is_valid()) nb::raise_python_error();
  FastPath& method = *Of(made.ptr());
  method.call = Call;
  method.function = Py_NewRef(function.ptr());
  method.collective = nb::int_(collective).release().ptr();
  method.op = Py_NewRef(op.ptr());
  method.least = least;
  method.most = most;
  method.exchanges = exchanges;
  return made;
}

}  // namespace

void BindFastPath(nb::module_& m) {
  g_call = PyUnicode_InternFromString("_call");
  nb::object type = nb::steal(PyType_FromSpec(&g_spec));
  if (!type.is_valid()) nb::raise_python_error();
  m.def("fast_path", [type](int collective, nb::object op, int operands) {
    return nb::cpp_function([type, collective, op, operands](nb::handle function) {
      return Make(type, function, collective, op, 2, operands + 1, false);
    });
  });
  m.def("fast_exchange", [type](int collective, nb::object op) {
    return nb::cpp_function(
        [type, collective, op](nb::handle function) { return Make(type, function, collective, op, 5, 5, true); });
  });
  m.def(
      "ranks_key", [](nb::handle dest, nb::handle source) { return RanksKey(dest.ptr(), source.ptr()); },
      nb::arg("dest").none(), nb::arg("source").none());
}

}  // namespace hetcoll
