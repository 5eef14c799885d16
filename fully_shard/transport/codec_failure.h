// What a codec threw. Where it was encoding, the ranks that wait for its codes learn of
// it: this rank sends a row without meaning, says so in the words that travel with it,
// and all of them throw alike. Where it was decoding within a collective, that goes on,
// and this rank throws when it is over.
//
//   failure.keep(can_tell, [&] { codec.encode(values, row); });
//   ...row and failure.words(words) travel...
//   failure.check(words of all, ranks, "unit 'l0' was not gathered");
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/internal/text_of_error.h"
#include "fully_shard/gather_codec.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class Collectives;

// What `run` throws says of which codec it is. what: " of parameter 'weight' failed to
// encode". Local.
template <class Run>
void run_codec(const GatherCodec& codec, const std::string& what, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "codec '", codec.name, "'", what, ": ", text_of(error));
  }
}

class CodecFailure {
 public:
  // Keeps what `encode` throws, or forgets what was kept. Throws it where the ranks that
  // wait can not be told: on devices, where no words travel.
  template <class Encode>
  void keep(bool can_tell, const Encode& encode) {
    error_.clear();
    try {
      encode();
    } catch (const std::exception& error) {
      if (!can_tell) throw;
      error_ = text_of(error);
    }
  }
  // Of the row that was encoded last. Local.
  NoticeWords words(NoticeWords of_values) const {
    if (!error_.empty()) of_values.agreement = kFailed;
    return of_values;
  }
  // The error of decoding what is sent now, for whoever decodes it: the first one counts.
  // Empty: none.
  std::shared_ptr<std::string> of_decoding() {
    decode_error_ = std::make_shared<std::string>();
    return decode_error_;
  }
  // Throws on all ranks of `on` alike, with `what` and the error of one that failed to
  // encode, where the words of one say so (none where none travel): collective over them
  // then. Else throws what decoding threw, on this rank alone.
  void check(const std::vector<NoticeWords>& words, const Collectives& on,
             const std::string& what) const;

 private:
  [[noreturn]] void raise(const Collectives& on, const std::string& what) const;

  static constexpr uint64_t kFailed = 2;  // instead of a hash of values
  std::string error_;                     // of encoding; empty: none
  std::shared_ptr<std::string> decode_error_;
};

}  // namespace fsdp::internal
