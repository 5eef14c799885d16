// Files of tokens that other tools write, mapped into memory: a rank reads what it asks
// for. Several are one text, in the order of their names. All numbers are little-endian.
//
//   nanoGPT       uint16, nothing else
//   llm.c         256 int32, which are 20240520 (uint16) or 20240801 (uint32), a version
//                 and the number of tokens; then these
//   Megatron      uint16, int32 or others, of which the .idx beside tells
//
// Documents are those of Megatron's index, and end with a token where one is named; of
// files without an index a document may go on in the next one. llm.c writes GPT-2's 50256
// before each document and nanoGPT after it: only the text's first token tells them
// apart.
#pragma once

#include "programs/trainer/data/tokens.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace programs {

class TokenFile;

class TokenFiles final : public Tokens {
 public:
  // A *.bin, or a folder with such files; none for `marks`: documents do not matter, and
  // there are none. Throws ValueError, naming the file, where a size is not what its
  // header says, or no multiple of a token's, or where nothing tells of its documents.
  explicit TokenFiles(const std::string& path, const std::optional<DocumentMarks>& marks = {});
  ~TokenFiles() override;

  int64_t size() const override { return ends_.back(); }
  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const override;
  std::vector<int64_t> document_begins(int64_t first, int64_t count) const override;

  // Whether `path` is such a file, or a folder with one.
  static bool are_at(const std::string& path);

 private:
  void check_indices() const;
  // Calls visit(file, first of it, count) for the parts of files that these tokens are.
  template <class Visit>
  void for_each_part(int64_t first, int64_t count, const Visit& visit) const;

  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<int64_t> ends_;  // of each file's tokens among all
  DocumentMarks marks_;
  std::vector<int64_t> begins_;  // of documents that indices tell of
};

}  // namespace programs
