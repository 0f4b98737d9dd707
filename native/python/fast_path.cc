#include "python/fast_path.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/types.h"
#include "python/call_words.h"
#include "python/piece_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hetcoll {
namespace {

// What the fast path understands of a method's arguments. All others must be what they are by default.
enum Word { kSend, kRecv, kOp, kWhere, kSource, kWords };

constexpr int kNoWord = -1;

struct Parameter {
  nb::object name;      // interned
  nb::object fallback;  // nothing where there is none
  int word;
};

// A method's parameters, read of its code object once.
class Signature {
 public:
  Signature(int collective, nb::handle function);

  // The words of a call; false where it is for the Python method, which also says what is wrong with it.
  bool Read(PyObject* const* args, Py_ssize_t given, PyObject* names, PyObject** words) const {
    if (given < 1 || given > positional_) return false;
    for (int word = 0; word < kWords; ++word) words[word] = fallbacks_[word].ptr();
    for (Py_ssize_t i = 1; i < given; ++i) words[parameters_[i].word] = args[i];
    if (names == nullptr ? given < needed_ : !ReadNamed(args, given, names, words)) return false;
    return rooted_ ? OfRoot(args[0], words) : words[kRecv] != Py_None || !needs_recv_;
  }

  // What `_call` of `self` gives; None where there is nothing to call it with.
  PyObject* Try(PyObject* self, PyObject* const* words) const;

 private:
  bool ReadNamed(PyObject* const* args, Py_ssize_t given, PyObject* names, PyObject** words) const;
  bool OfRoot(PyObject* self, PyObject** words) const;

  nb::object collective_;
  std::vector<Parameter> parameters_;
  std::array<nb::object, kWords> fallbacks_;
  Py_ssize_t positional_ = 0;
  Py_ssize_t needed_ = 0;  // of these, those without a default
  int number_;
  bool rooted_;              // one of the buffers is the root's alone
  bool needs_recv_ = false;  // it has one, and is not in place without
  bool exchanges_ = false;   // dest and source in place of a root
};

struct FastPath {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;  // the method as it is written in Python
  Signature signature;
};

PyObject* g_call;         // "_call"
PyObject* g_rank;         // "_rank"
PyObject* g_method_type;  // types.MethodType: PyMethod_New is not in the stable ABI

FastPath* Of(PyObject* object) { return reinterpret_cast<FastPath*>(object); }

int WordOf(std::string_view name) {
  if (name == "sendbuf" || name == "buf") return kSend;
  if (name == "recvbuf") return kRecv;
  if (name == "op") return kOp;
  if (name == "root" || name == "peer" || name == "dest") return kWhere;
  return name == "source" ? kSource : kNoWord;
}

bool Is(int number, Collective collective) { return number == static_cast<int>(collective); }

Signature::Signature(int number, nb::handle function)
    : collective_(nb::int_(number)),
      number_(number),
      rooted_(Is(number, Collective::kReduce) || Is(number, Collective::kGather) || Is(number, Collective::kScatter)) {
  const nb::object code = function.attr("__code__"), by_place = function.attr("__defaults__"),
                   by_name = function.attr("__kwdefaults__"), names = code.attr("co_varnames");
  positional_ = nb::cast<Py_ssize_t>(code.attr("co_argcount"));
  const auto all = positional_ + nb::cast<Py_ssize_t>(code.attr("co_kwonlyargcount"));
  const Py_ssize_t first = positional_ - static_cast<Py_ssize_t>(by_place.is_none() ? 0 : nb::len(by_place));
  needed_ = first;
  fallbacks_ = {nb::steal(PyByteArray_FromStringAndSize("", 0)), nb::none(),
                nb::steal(PyUnicode_InternFromString("sum")), nb::int_(0), nb::none()};
  for (Py_ssize_t i = 0; i < all; ++i) {
    Parameter& made =
        parameters_.emplace_back(nb::object(names[i]), nb::object(), WordOf(nb::cast<const char*>(names[i])));
    if (i >= positional_) {
      made.fallback = by_name[made.name];
    } else if (i >= first) {
      made.fallback = by_place[i - first];
    }
    if (made.word != kNoWord) fallbacks_[made.word] = made.fallback;
    if (made.word == kSource) exchanges_ = true;
    if (made.word == kRecv) needs_recv_ = !Is(number, Collective::kAllreduce);
    if (i > 0 && i < positional_ && made.word == kNoWord) throw nb::type_error("fast_path: a positional parameter");
  }
}

bool Signature::ReadNamed(PyObject* const* args, Py_ssize_t given, PyObject* names, PyObject** words) const {
  for (Py_ssize_t i = 0; i < NB_TUPLE_GET_SIZE(names); ++i) {
    const auto found = std::find_if(parameters_.begin() + given, parameters_.end(), [&](const Parameter& parameter) {
      return parameter.name.is(NB_TUPLE_GET_ITEM(names, i));
    });
    if (found == parameters_.end()) return false;
    if (found->word != kNoWord) {
      words[found->word] = args[given + i];
    } else if (!found->fallback.is(args[given + i])) {
      return false;
    }
  }
  return std::find(words, words + kWords, nullptr) == words + kWords;
}

// The buffer that only the root has is not looked at elsewhere; there the other one is the first word.
bool Signature::OfRoot(PyObject* self, PyObject** words) const {
  const nb::object rank = nb::steal(PyObject_GetAttr(self, g_rank));
  if (!rank.is_valid()) {
    PyErr_Clear();
    return false;
  }
  if (SmallNumber(rank.ptr()) == SmallNumber(words[kWhere])) {
    return words[kRecv] != Py_None || Is(number_, Collective::kReduce);
  }
  if (Is(number_, Collective::kReduce) && (PyUnicode_Check(words[kRecv]) || PyLong_Check(words[kRecv]))) {
    return false;  // an op where the buffer is
  }
  if (Is(number_, Collective::kScatter)) words[kSend] = words[kRecv];
  words[kRecv] = Py_None;
  return true;
}

PyObject* Signature::Try(PyObject* self, PyObject* const* words) const {
  PyObject* where = words[kWhere];
  nb::object ranks;
  if (exchanges_) {
    const std::int32_t key = RanksKey(words[kWhere], words[kSource]);
    if (key < 0) return Py_NewRef(Py_None);
    ranks = nb::steal(PyLong_FromLong(key));
    where = ranks.ptr();
  }
  const nb::object call = nb::steal(PyObject_GetAttr(self, g_call));
  if (where == nullptr || !call.is_valid()) return nullptr;
  PyObject* const all[] = {nullptr, collective_.ptr(), words[kSend], words[kRecv], words[kOp], where};
  constexpr std::size_t kAll = std::size(all) - 1;
  return PyObject_Vectorcall(call.ptr(), all + 1, kAll | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* Call(PyObject* object, PyObject* const* args, std::size_t flags, PyObject* names) {
  const FastPath& method = *Of(object);
  PyObject* words[kWords];
  if (method.signature.Read(args, static_cast<Py_ssize_t>(NB_VECTORCALL_NARGS(flags)), names, words)) {
    PyObject* done = method.signature.Try(args[0], words);
    if (done != Py_None) return done;  // also where it raised
    Py_DECREF(done);
  }
  return PyObject_Vectorcall(method.function, args, flags, names);
}

PyObject* Bind(PyObject* object, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(object);
  PyObject* const both[] = {object, instance};
  return PyObject_Vectorcall(g_method_type, both, 2, nullptr);
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
  std::destroy_at(&Of(object)->signature);
  PyObject_GC_Del(object);
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

nb::object Make(nb::handle type, int collective, nb::handle function) {
  Signature signature(collective, function);
  nb::object made = nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type.ptr()), 0));
  if (!made.is_valid()) nb::raise_python_error();
  FastPath& method = *Of(made.ptr());
  std::construct_at(&method.signature, std::move(signature));
  method.call = Call;
  method.function = Py_NewRef(function.ptr());
  return made;
}

}  // namespace

void BindFastPath(nb::module_& m) {
  g_call = PyUnicode_InternFromString("_call");
  g_rank = PyUnicode_InternFromString("_rank");
  g_method_type = nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
  nb::object type = nb::steal(PyType_FromSpec(&g_spec));
  if (!type.is_valid()) nb::raise_python_error();
  m.def("piece_rows", &PieceRows, "here"_a, "there"_a, "length"_a, "here_count"_a, "there_count"_a, "itemsize"_a);
  m.def("fast_path", [type](int collective) {
    return nb::cpp_function([type, collective](nb::handle function) { return Make(type, collective, function); });
  });
  m.def(
      "ranks_key", [](nb::handle dest, nb::handle source) { return RanksKey(dest.ptr(), source.ptr()); },
      nb::arg("dest").none(), nb::arg("source").none());
}

void BindRepeated(nb::class_<PyEngine>& engine) {
  engine.def("call", &PyEngine::Call, "collective"_a, "send"_a.none(), "recv"_a.none(), "op"_a.none(), "root"_a.none())
      .def("knows", &PyEngine::Knows, "kind"_a, "buffer"_a.none(), "peer"_a.none())
      .def("run_messages", &PyEngine::RunMessages, "messages"_a)
      .def("run", &PyEngine::RunShape, "shape"_a, "send"_a, "recv"_a, "timeout"_a, "residual"_a = 0)
      .def("submit", &PyEngine::Submit, "shape"_a, "send"_a, "recv"_a, "background"_a, "residual"_a = 0,
           "snapshot"_a = 0)
      .def("wait", &PyEngine::Wait, "ticket"_a, "timeout"_a);
}

}  // namespace hetcoll
