#include "device_mesh/peer_memory/shared_segment.h"

#include "device_mesh/internal/weak_registry.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

std::string reason() { return std::strerror(errno); }

uint64_t draw_mark() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never 0, as untouched memory is
}

// ftruncate() would end the process by a signal.
void check_file_size_limit(size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  TORCH_CHECK(bytes <= limit.rlim_cur, "shared memory of ", bytes,
              " bytes: the limit of file sizes (ulimit -f) is ", limit.rlim_cur, " bytes");
}

char* map(int fd, size_t bytes) {
  auto* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(data != MAP_FAILED, "shared memory of ", bytes,
              " bytes can not be mapped: ", reason(), ". Look at ulimit -v");
  return static_cast<char*>(data);
}

uint64_t& mark_in(char* data) { return *reinterpret_cast<uint64_t*>(data); }

using OwnSegments = WeakRegistry<uint64_t, SharedSegment>;
OwnSegments& own_segments() {
  static auto& segments = *new OwnSegments();
  return segments;
}

}  // namespace

// Closed unless it is taken.
class SharedSegment::Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

SharedSegment::SharedSegment(const SegmentName& name, int fd, char* data)
    : name_(name), fd_(fd), data_(data) {}

SharedSegment::~SharedSegment() {
  munmap(data_, name_.bytes);
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<SharedSegment> SharedSegment::create(size_t bytes) {
  check_file_size_limit(bytes);
  Descriptor fd(memfd_create("fsdp peer memory", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TORCH_CHECK(fd.get() >= 0, "no shared memory: memfd_create: ", reason());
  TORCH_CHECK(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "shared memory of ", bytes,
              " bytes: ftruncate: ", reason());
  // A process that maps it may rely on its size.
  fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  auto* const data = map(fd.get(), bytes);
  const SegmentName name{
      .pid = getpid(), .fd = fd.get(), .bytes = bytes, .mark = mark_in(data) = draw_mark()};
  return own_segments().find_or_make(name.mark, [&] {
    return std::shared_ptr<SharedSegment>(new SharedSegment(name, fd.take(), data));
  });
}

std::shared_ptr<SharedSegment> SharedSegment::open(const SegmentName& name) {
  if (name.pid == getpid()) {
    auto own = own_segments().find(name.mark);
    TORCH_CHECK(own, "the memory of another rank of this process is gone");
    return own;
  }
  const auto path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const Descriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  TORCH_CHECK(fd.get() >= 0, "the memory of process ", name.pid, " can not be opened: ", reason());
  std::shared_ptr<SharedSegment> opened(new SharedSegment(name, -1, map(fd.get(), name.bytes)));
  TORCH_CHECK(lseek(fd.get(), 0, SEEK_END) == static_cast<off_t>(name.bytes) &&
                  mark_in(opened->data_) == name.mark,
              "what lies in process ", name.pid, " is not the memory that it told of");
  return opened;
}

}  // namespace fsdp::internal
