#include "module.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "settings.h"

namespace fake {
namespace {

std::map<Module*, std::shared_ptr<Module>>& modules() {
  static auto* const all = new std::map<Module*, std::shared_ptr<Module>>;
  return *all;
}

// The drivers are given no length either: the section headers end an image.
std::size_t image_bytes(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_type != ET_DYN) return 0;
  return header.e_shoff + static_cast<std::size_t>(header.e_shnum) * header.e_shentsize;
}

// dlopen takes an equal path for the library it has already, and descriptors come again: so no two paths are equal, not
// those of both vendors' fakes in one process either.
std::string unique_path(int fd) {
  static std::atomic<unsigned> next{1};
  std::string path = std::strcmp(kVendor.name, "CUDA") == 0 ? "/proc/self/fd/" : "/proc/./self/fd/";
  for (unsigned bits = next++; bits != 0; bits /= 2) path += bits % 2 ? "./" : "../fd/";
  return path + std::to_string(fd);
}

void* open_image(const void* image, std::size_t nbytes) {
  int fd = memfd_create("fake-module", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  std::size_t written = 0;
  while (written < nbytes) {
    ssize_t count = write(fd, static_cast<const char*>(image) + written, nbytes - written);
    if (count <= 0) break;
    written += static_cast<std::size_t>(count);
  }
  void* library = written == nbytes ? dlopen(unique_path(fd).c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) complain("an image cannot be loaded: %s", dlerror());
  close(fd);
  return library;
}

}  // namespace

Module::~Module() {
  if (library) dlclose(library);
}

Error load_module(const void* image, Module** out) {
  if (!image) return kInvalidValue;
  std::size_t nbytes = image_bytes(image);
  if (nbytes == 0) return kInvalidImage;
  auto module = std::make_shared<Module>();
  module->library = open_image(image, nbytes);
  if (!module->library) return kInvalidImage;
  auto* about = static_cast<const Image*>(dlsym(module->library, "fake_image"));
  if (!about || std::strcmp(about->vendor, kVendor.name) != 0) return kInvalidImage;
  if (settings().arch != about->arch) return kNoBinary;
  about->bind(&hooks());
  std::lock_guard lock(state_mutex());
  *out = module.get();
  modules()[*out] = std::move(module);
  return kOk;
}

Error unload_module(Module* module) {
  std::lock_guard lock(state_mutex());
  return modules().erase(module) ? kOk : kInvalidHandle;  // launches that are under way keep it
}

Error get_function(Module* module, const char* name, Function** out) {
  std::lock_guard lock(state_mutex());
  std::unique_ptr<Function>& function = module->functions[name];
  if (!function) {
    auto* kernel = static_cast<const Kernel*>(dlsym(module->library, (std::string("fake_kernel_") + name).c_str()));
    if (!kernel || !dlsym(module->library, name)) {  // absent, or its name is mangled
      module->functions.erase(name);
      return kNotFound;
    }
    function = std::make_unique<Function>();
    function->name = name;
    function->kernel = kernel;
  }
  *out = function.get();
  return kOk;
}

Error get_global(Module* module, const char* name, std::uintptr_t* address, std::size_t* nbytes) {
  std::lock_guard lock(state_mutex());
  void* found = dlsym(module->library, name);
  Dl_info info;
  const Elf64_Sym* symbol = nullptr;
  if (!found || !dladdr1(found, &info, reinterpret_cast<void**>(const_cast<Elf64_Sym**>(&symbol)), RTLD_DL_SYMENT) ||
      !symbol) {
    return kNotFound;
  }
  *address = reinterpret_cast<std::uintptr_t>(found);
  *nbytes = symbol->st_size;
  return kOk;
}

bool known_module(Module* module) {
  std::lock_guard lock(state_mutex());
  return modules().count(module) != 0;
}

bool known_function(Function* function) {
  std::lock_guard lock(state_mutex());
  for (auto& [module, owned] : modules()) {
    for (auto& [name, each] : module->functions) {
      if (each.get() == function) return true;
    }
  }
  return false;
}

namespace {

using Arguments = std::vector<std::vector<unsigned char>>;

Error read_arguments(const Kernel& kernel, void** parameters, void** extra, Arguments* arguments) {
  const unsigned char* packed = nullptr;
  std::size_t packed_bytes = 0;
  for (void** item = extra; !parameters && item && *item; item += 2) {
    auto what = reinterpret_cast<std::uintptr_t>(*item);
    if (what == 1) packed = static_cast<const unsigned char*>(item[1]);
    if (what == 2) packed_bytes = *static_cast<const std::size_t*>(item[1]);
  }
  if (kernel.parameters && !parameters && !packed) return kInvalidValue;
  std::size_t at = 0;
  for (unsigned i = 0; i < kernel.parameters; ++i) {
    std::size_t size = kernel.sizes[i], unit = kernel.alignments[i];
    at = (at + unit - 1) / unit * unit;
    auto* bytes = parameters ? static_cast<const unsigned char*>(parameters[i]) : packed + at;
    at += size;
    if (!parameters && at > packed_bytes) return kInvalidValue;
    arguments->emplace_back(bytes, bytes + size);
  }
  return kOk;
}

std::shared_ptr<Module> owner_of(const Function* function) {
  std::lock_guard lock(state_mutex());
  for (auto& [address, owned] : modules()) {
    auto found = owned->functions.find(function->name);
    if (found != owned->functions.end() && found->second.get() == function) return owned;
  }
  return nullptr;
}

}  // namespace

Error launch(Stream* stream, Function* function, const Shape& shape, void** parameters, void** extra) {
  std::size_t threads = static_cast<std::size_t>(shape.block[0]) * shape.block[1] * shape.block[2];
  if (threads == 0 || threads > 1024 || shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[2] == 0) {
    return kInvalidValue;
  }
  if (shape.grid[1] > 65535 || shape.grid[2] > 65535 || shape.shared_bytes > 48 * 1024) return kInvalidValue;
  auto arguments = std::make_shared<Arguments>();
  if (Error error = read_arguments(*function->kernel, parameters, extra, arguments.get())) return error;
  std::shared_ptr<Module> module = owner_of(function);
  if (!module) return kInvalidHandle;
  return enqueue(stream, "kernel", [=](Execution& execution) {
    std::vector<void*> pointers;
    for (auto& argument : *arguments) pointers.push_back(argument.data());
    (void)module;  // keeps the code
    return run_kernel(execution, *function, shape, pointers.data());
  });
}

}  // namespace fake
