#include "checkpoint/checkpoint.h"
#include "checkpoint/save/background_save.h"
#include "checkpoint/save/saving.h"

namespace fsdp {

void save(const State& state, const std::string& path, SaveOptions options) {
  using namespace internal::checkpoint;  // NOLINT: this is its front
  Saving saving(path, options);
  saving.begin(state, [] { BackgroundSave::finish_previous(); });
  StagingBuffer unused;
  saving.take(unused, /*staged_bytes=*/0);
  saving.finish(default_world());
}

}  // namespace fsdp
