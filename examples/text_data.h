// Byte-level training text: every byte of a file, or of all text files under a folder, is
// one token of a 256-token vocabulary. One span in twenty is held out for validation.
//
//   TextData data(default_text_folder(), /*seed=*/1);
//   auto batch = data.training_batch(step, rank, /*rows=*/8, /*tokens=*/128);
//
// Batches depend on the seed, the step and the row's number in the global batch only, so
// any rank can make any other rank's batch, and 2 ranks x 4 rows see what 1 rank x 8 rows
// sees.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace examples {

struct Batch {
  at::Tensor inputs;   // int64 [rows, tokens]
  at::Tensor targets;  // int64 [rows, tokens]: inputs, one token later
};

class TextData {
 public:
  // Reads `path` into memory. Throws ValueError when it cannot be read or has fewer than
  // 64 KiB of text.
  TextData(const std::string& path, uint64_t seed);

  // Rows rank * rows ... of the global batch of `step`. Local.
  Batch training_batch(int64_t step, int64_t rank, int64_t rows, int64_t tokens) const;
  Batch held_out_batch(int64_t index, int64_t rank, int64_t rows, int64_t tokens) const;

  int64_t training_bytes() const { return training_.numel(); }
  int64_t held_out_bytes() const { return held_out_.numel(); }

 private:
  Batch draw(const at::Tensor& text, uint64_t stream, int64_t step, int64_t rank, int64_t rows,
             int64_t tokens) const;

  uint64_t seed_;
  at::Tensor training_, held_out_;  // uint8
};

// The headers of the LibTorch that this process runs on: tens of megabytes of C++ that
// every user of this library has. Throws ValueError when they are not beside its
// libraries.
std::string default_text_folder();

// Text <-> tokens, one per byte: int64 [bytes] on the CPU.
at::Tensor encode(const std::string& text);
std::string decode(const at::Tensor& tokens);

}  // namespace examples
