// A simulated accelerator, for tests of programs on a device: two devices whose memory the host may not touch.
//
// Every allocation is a mapping of its own without any permission, opened only while a copy or a kernel of the device
// runs: a stray access by the host, and one after the free, ends the process. Kernels are those of the CPU, on copies.
// What a program asks of the device is counted: kernels by name, copies to the host, waits, allocations, bytes.
// A copy from pinned memory with non_blocking=True happens when the device next does something, as late as it may.

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr c10::DeviceIndex kDevices = 2;
constexpr auto kKind = c10::DeviceType::PrivateUse1;

struct Block {
  size_t size;
  int users;
  c10::DeviceIndex device;
};

std::recursive_mutex one_at_a_time;
std::map<char*, Block> blocks;
std::set<const void*> pinned;
std::map<std::string, long> counts;
std::deque<std::function<void()>> late_copies;
long live_bytes = 0, most_bytes = 0, limit_of_bytes = 0;
bool only_the_known = false;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};
thread_local int inside_a_kernel = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

void count(const std::string& what) {
  Lock lock(one_at_a_time);
  ++counts[what];
}

void finish_late_copies() {
  Lock lock(one_at_a_time);
  while (!late_copies.empty()) {
    auto copy = std::move(late_copies.front());
    late_copies.pop_front();
    copy();
  }
}

void wait_for(const char* what) {
  count(std::string("wait: ") + what);
  finish_late_copies();
}

std::map<char*, Block>::iterator block_of(const void* pointer) {
  auto next = blocks.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
  if (next == blocks.begin()) return blocks.end();
  auto found = std::prev(next);
  return static_cast<const char*>(pointer) < found->first + found->second.size ? found : blocks.end();
}

// The memory behind a pointer may be touched as long as this lives; of the host's memory nothing changes.
class Opened {
 public:
  explicit Opened(const void* pointer) : lock_(one_at_a_time), block_(block_of(pointer)) {
    if (block_ != blocks.end() && block_->second.users++ == 0)
      mprotect(block_->first, block_->second.size, PROT_READ | PROT_WRITE);
  }
  ~Opened() {
    if (block_ != blocks.end() && --block_->second.users == 0)
      mprotect(block_->first, block_->second.size, PROT_NONE);
  }

 private:
  Lock lock_;
  std::map<char*, Block>::iterator block_;
};

void free_block(void* pointer) {
  Lock lock(one_at_a_time);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;
  live_bytes -= static_cast<long>(found->second.size);
  munmap(found->first, found->second.size);
  blocks.erase(found);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kKind, current_device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    Lock lock(one_at_a_time);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), size = (bytes + page - 1) / page * page;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        !limit_of_bytes || live_bytes + static_cast<long>(size) <= limit_of_bytes,
        "the simulated device is out of memory");
    void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "simulated device: out of memory");
    blocks[static_cast<char*>(memory)] = {size, 0, current_device};
    ++counts["allocation"];
    live_bytes += static_cast<long>(size);
    most_bytes = std::max(most_bytes, live_bytes);
    return {memory, memory, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    count("copy within the device");
    Opened opened_to(to), opened_from(from);
    std::memcpy(to, from, bytes);
  }
};

void free_pinned(void* pointer) {
  Lock lock(one_at_a_time);
  pinned.erase(pointer);
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(std::max<size_t>(bytes, 1));
    Lock lock(one_at_a_time);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kKind, &device_allocator)

bool is_pinned_tensor(const at::Tensor& tensor) {
  return tensor.is_cpu() && pinned.count(tensor.storage().data()) > 0;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current_device;
    setDevice(device);
    return {kKind, before};
  }
  c10::Device getDevice() const override { return {kKind, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "simulated device: there is no device ", device.index());
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {kKind, index}, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kKind, device.index() < 0 ? current_device : device.index()});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, {kKind, device.index() < 0 ? current_device : device.index()}, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    static int an_event;
    *event = &an_event;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for("stream"); }
  void synchronizeEvent(void*) const override { wait_for("event"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { count("record_stream"); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kKind, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kKind, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override {
    Lock lock(one_at_a_time);
    return pinned.count(pointer) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(one_at_a_time);
    auto found = block_of(pointer);
    return {kKind, found == blocks.end() ? current_device : found->second.device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto before = current_device;
    current_device = storage.device().index();
    auto memory = device_allocator.allocate(bytes);
    current_device = before;
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) device_allocator.copy_data(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// The elements of a tensor as one of the CPU's over the very same memory.
at::Tensor on_the_host(const at::Tensor& tensor, void* memory) {
  auto made = at::from_blob(
      memory, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU).requires_grad(false));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  if (!to.numel()) return;
  void* source = const_cast<void*>(from.const_data_ptr());
  void* target = to.mutable_data_ptr();
  Opened opened_source(source), opened_target(target);
  on_the_host(to, target).copy_(on_the_host(from, source));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const auto from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (non_blocking && is_pinned_tensor(from) && !inside_a_kernel) {
    count("copy to the device, later");
    Lock lock(one_at_a_time);
    late_copies.emplace_back([from, dst] { copy_now(from, dst); });
    return dst;
  }
  finish_late_copies();
  if (!inside_a_kernel) {
    const bool leaves = dst.is_cpu(), enters = from.is_cpu();
    count(leaves ? "wait: copy to the host" : enters ? "copy to the device" : "copy within the device");
  }
  copy_now(from, dst);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) const_cast<at::Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!inside_a_kernel) wait_for("item");
  const void* memory = self.const_data_ptr();
  Opened opened(memory);
  return on_the_host(self, const_cast<void*>(memory)).item();
}

at::Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kKind)));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kKind)));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void make_room(const at::Tensor& self) {
  const auto* impl = self.unsafeGetTensorImpl();
  const auto needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), self.dtype().itemsize(), static_cast<size_t>(impl->storage_offset()));
  if (self.numel() && needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  make_room(self);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  make_room(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(
      self, at::Storage(at::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true), 0, {0}, {});
}

void record_stream(at::Tensor&, at::Stream) { count("record_stream"); }

void run_on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* name) {
  finish_late_copies();
  if (!inside_a_kernel) {
    const auto what = std::string("kernel: ") + name;
    TORCH_CHECK(!only_the_known || counts.count(what), "the simulated device has no ", name);
    count(what);
  }
  ++inside_a_kernel;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --inside_a_kernel;
    throw;
  }
  --inside_a_kernel;
}

void any_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_the_cpu(op, stack, op.schema().operator_name().name.c_str());
}

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static auto whole = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_the_cpu(whole, stack, op.schema().operator_name().name.c_str());
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static auto whole = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto arguments = op.schema().arguments().size();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(arguments);
  const auto channels = first->toTensor().size(1);
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{channels}));
  run_on_the_cpu(whole, stack, op.schema().operator_name().name.c_str());
}

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registered;

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

extern "C" {
int simulated_device() { return current_device; }
void simulated_set_device(int index) { Guard().setDevice({kKind, static_cast<c10::DeviceIndex>(index)}); }
void simulated_synchronize() { wait_for("device"); }
long simulated_live_bytes() { return live_bytes; }
long simulated_most_bytes() { return most_bytes; }
void simulated_forget() {
  Lock lock(one_at_a_time);
  counts.clear();
  most_bytes = live_bytes;
}
// From now on only kernels that have been counted, and no more than so many bytes; 0 for any.
void simulated_restrict(bool to_the_known, long bytes) {
  only_the_known = to_the_known;
  limit_of_bytes = bytes;
}
// What was counted, a line each: "count what".
const char* simulated_counts() {
  static std::string text;
  Lock lock(one_at_a_time);
  text.clear();
  for (const auto& [what, number] : counts) text += std::to_string(number) + " " + what + "\n";
  return text.c_str();
}
}
