// Files of tokens that other tools write, mapped into memory: a rank reads what it asks
// for. Several are one text, in the order of their names. All numbers are little-endian.
//
//   nanoGPT       uint16, nothing else
//   llm.c         256 int32, which are 20240520 (uint16) or 20240801 (uint32), a version
//                 and the number of tokens; then these
//   Megatron      uint16, int32 or others, of which the .idx beside tells
#pragma once

#include "examples/tokens.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace examples {

class TokenFile;

class TokenFiles final : public Tokens {
 public:
  // A *.bin, or a folder with such files. Throws ValueError, naming the file, where a
  // size is not what its header says, or no multiple of a token's.
  explicit TokenFiles(const std::string& path);
  ~TokenFiles() override;

  int64_t size() const override { return ends_.back(); }
  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const override;

  // Whether `path` is such a file, or a folder with one.
  static bool are_at(const std::string& path);

 private:
  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<int64_t> ends_;  // of each file's tokens among all
};

}  // namespace examples
