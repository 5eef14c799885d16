// A piece of memory that processes of one host share: a memfd, which has no name that
// could be left behind, and which only processes of the same user can open.
//
//   const auto own = SharedSegment::create(1 << 20);
//   ... the other process is told own->name() ...
//   const auto theirs = SharedSegment::open(name);   // the same memory
//
// It lives as long as one process maps it. Linux only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fsdp::internal {

struct SegmentName {
  int64_t pid = 0;  // of the process that made it
  int fd = -1;      // there
  uint64_t bytes = 0;
  uint64_t mark = 0;  // drawn for this segment: what lies there under a number used again is not it
};

class SharedSegment {
 public:
  // Its first bytes are its own; the memory behind them is zeroed.
  static constexpr size_t kHeaderBytes = 64;

  // Throws c10::Error that says what the system refuses. Memory is taken when it is
  // touched.
  static std::shared_ptr<SharedSegment> create(size_t bytes);
  // Throws c10::Error where that process has ended, is another user's, or has something
  // else there. A segment of this process is the same object.
  static std::shared_ptr<SharedSegment> open(const SegmentName& name);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  const SegmentName& name() const { return name_; }
  char* data() const { return data_; }
  size_t bytes() const { return name_.bytes; }

 private:
  class Descriptor;
  SharedSegment(const SegmentName& name, int fd, char* data);

  SegmentName name_;
  int fd_;  // -1: another process has it
  char* data_;
};

}  // namespace fsdp::internal
