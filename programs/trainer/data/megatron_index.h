// The .idx file that Megatron-LM writes beside a file of tokens: magic, version, dtype,
// the numbers of sequences and of documents, then for all sequences their lengths (int32)
// and places (int64), and of which sequence on each document is (int64; the last one says
// how many sequences there are).
#pragma once

#include "programs/trainer/data/mapped_file.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace programs {

class MegatronIndex {
 public:
  static bool is_beside(const std::string& tokens_path);
  // Throws ValueError, naming the index, where it is none, or not whole.
  explicit MegatronIndex(const std::string& tokens_path);

  c10::ScalarType dtype() const;
  int64_t tokens() const;
  // The places of tokens at which documents begin, ascending, without empty documents.
  // Throws ValueError where documents are not of the sequences, in their order.
  std::vector<int64_t> document_begins() const;

 private:
  int64_t documents() const;  // one more, which is where the last one ends

  std::string path_;
  MappedFile file_;
  int64_t sequences_;
};

}  // namespace programs
