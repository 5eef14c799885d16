// A save that goes on in the background while training does.
//
//   fsdp::SaveHandle saving = fsdp::async_save({.model = model, .optimizer = optimizer},
//                                              "runs/step-1000", {.step = 1000});
//   ...                // the model may change at once
//   saving.wait();     // the checkpoint stands
//
// The call copies this rank's part into host memory and returns; a thread writes it, with
// a process group of its own, so that no collective of the training waits for it or is
// waited for. One at a time: the next save waits for it. Same contract and errors as
// save(); what goes wrong in the background is thrown by wait(), or else by the next
// save(), async_save() or destroy_process_group(), which waits for it.
#pragma once

#include "checkpoint/checkpoint.h"
#include "device_mesh/api.h"

#include <cstdint>
#include <memory>
#include <string>

namespace fsdp {

namespace internal::checkpoint {
class BackgroundSave;
}

struct AsyncOptions {
  // The most that the copies may take; what exceeds it is written before the call
  // returns.
  int64_t staging_bytes = INT64_MAX;
};

// Movable. One that is destroyed waits first, and leaves an error to the next save, or
// to destroy_process_group().
class [[nodiscard]] FSDP_API SaveHandle {
 public:
  SaveHandle() = default;  // of nothing: done
  SaveHandle(SaveHandle&&) noexcept = default;
  SaveHandle& operator=(SaveHandle&& other) noexcept;
  ~SaveHandle();

  bool is_done() const;  // well or not; does not wait
  // Returns when the checkpoint stands. Throws what went wrong, on all ranks alike.
  void wait();

 private:
  friend SaveHandle async_save(const State&, const std::string&, SaveOptions, AsyncOptions);
  explicit SaveHandle(std::shared_ptr<internal::checkpoint::BackgroundSave> save);

  std::shared_ptr<internal::checkpoint::BackgroundSave> save_;
};

// Collective over the default process group until it returns, the first time also to make
// the group of the background.
FSDP_API SaveHandle async_save(const State& state, const std::string& path,
                               SaveOptions options = {}, AsyncOptions async = {});

}  // namespace fsdp
