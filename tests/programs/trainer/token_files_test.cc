#include "programs/trainer/data/token_files.h"

#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::message_of;
using fsdp::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Number>
std::string bytes_of(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string llm_c_header(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = tokens;
  return bytes_of(header);
}

// documents: of which sequence on each is, and how many sequences there are.
std::string megatron_index(uint8_t dtype, const std::vector<int32_t>& lengths,
                           const std::vector<int64_t>& documents) {
  const std::vector<int64_t> pointers(lengths.size());
  return std::string("MMIDIDX\0\0", 9) + bytes_of<uint64_t>({1}) + bytes_of<uint8_t>({dtype}) +
         bytes_of<uint64_t>({lengths.size(), documents.size()}) + bytes_of(lengths) +
         bytes_of(pointers) + bytes_of(documents);
}

// Each sequence a document.
std::string megatron_index(uint8_t dtype, const std::vector<int32_t>& lengths) {
  std::vector<int64_t> documents(lengths.size() + 1);
  std::iota(documents.begin(), documents.end(), 0);
  return megatron_index(dtype, lengths, documents);
}

std::vector<int64_t> read(const std::string& path, int64_t first, int64_t count,
                          int64_t vocab = int64_t{1} << 33) {
  const auto tokens = TokenFiles(path).read(first, count, vocab);
  const auto* const values = tokens.const_data_ptr<int64_t>();
  return {values, values + tokens.numel()};
}

std::vector<int64_t> all_of(const std::string& path) {
  return read(path, 0, TokenFiles(path).size());
}

using Numbers = std::vector<int64_t>;

TEST(TokenFiles, OfNanoGptAreUint16) {
  const TemporaryFolder folder;
  write(folder / "train.bin", bytes_of<uint16_t>({0, 7, 65535, 3}));
  EXPECT_EQ(all_of(folder / "train.bin"), (Numbers{0, 7, 65535, 3}));
  EXPECT_EQ(read(folder / "train.bin", 1, 2), (Numbers{7, 65535}));
}

TEST(TokenFiles, OfLlmCHaveAHeader) {
  const TemporaryFolder folder;
  write(folder / "gpt2.bin", llm_c_header(20240520, 1, 3) + bytes_of<uint16_t>({1, 2, 50256}));
  write(folder / "llama3.bin", llm_c_header(20240801, 7, 2) + bytes_of<uint32_t>({128000, 5}));
  EXPECT_EQ(all_of(folder / "gpt2.bin"), (Numbers{1, 2, 50256}));
  EXPECT_EQ(all_of(folder / "llama3.bin"), (Numbers{128000, 5}));
}

TEST(TokenFiles, OfMegatronHaveAnIndex) {
  const TemporaryFolder folder;
  write(folder / "a.bin", bytes_of<int32_t>({1, 2, 3, 4, 100000}));
  write(folder / "a.idx", megatron_index(4, {2, 3}));
  write(folder / "b.bin", bytes_of<uint16_t>({6}));
  write(folder / "b.idx", megatron_index(8, {1}));
  EXPECT_EQ(all_of(folder / "a.bin"), (Numbers{1, 2, 3, 4, 100000}));
  EXPECT_EQ(all_of(folder / "b.bin"), (Numbers{6}));
}

TEST(TokenFiles, OfAFolderAreOneText) {
  const TemporaryFolder folder;
  write(folder / "2.bin", bytes_of<uint16_t>({3, 4, 5}));
  write(folder / "1.bin", bytes_of<uint16_t>({1, 2}));
  write(folder / "3.bin", "");
  write(folder / "4.bin", llm_c_header(20240801, 7, 1) + bytes_of<uint32_t>({6}));
  write(folder / "notes.txt", "not a token");
  EXPECT_EQ(all_of(folder.path()), (Numbers{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read(folder.path(), 1, 5), (Numbers{2, 3, 4, 5, 6}));
  EXPECT_EQ(read(folder.path(), 2, 1), (Numbers{3}));
}

TEST(TokenFiles, AreToldFromText) {
  const TemporaryFolder folder;
  write(folder / "text.txt", "some");
  EXPECT_FALSE(TokenFiles::are_at(folder.path()));
  EXPECT_FALSE(TokenFiles::are_at(folder / "text.txt"));
  EXPECT_FALSE(TokenFiles::are_at(folder / "missing.bin"));
  write(folder / "tokens.bin", bytes_of<uint16_t>({1}));
  EXPECT_TRUE(TokenFiles::are_at(folder.path()));
  EXPECT_TRUE(TokenFiles::are_at(folder / "tokens.bin"));
}

// Each names the file, or the index beside it.
TEST(TokenFiles, ThatAreDamagedAreRefused) {
  const TemporaryFolder folder;
  const auto expect_refusal = [&](const std::string& name, const std::string& bytes,
                                  const std::string& text) {
    write(folder / name, bytes);
    EXPECT_THAT(message_of([&] { TokenFiles{folder / name}; }),
                AllOf(HasSubstr(folder / name.substr(0, name.find('.'))), HasSubstr(text)));
  };
  expect_refusal("odd.bin", "abc", "3 bytes of tokens of 2 bytes each");
  expect_refusal("empty.bin", "", "has no tokens");
  expect_refusal("short.bin", llm_c_header(20240520, 1, 3) + bytes_of<uint16_t>({1, 2}),
                 "has 2 tokens where its header says 3");
  expect_refusal("half.bin", llm_c_header(20240801, 7, 1) + "ab", "2 bytes of tokens of 4 bytes");
  expect_refusal("new.bin", llm_c_header(20240801, 8, 0), "version 8 of llm.c's format");
  write(folder / "cut.idx", megatron_index(8, {2, 2}));
  expect_refusal("cut.bin", bytes_of<uint16_t>({1, 2, 3}), "has 3 tokens where its header says 4");
  write(folder / "float.idx", megatron_index(7, {1}));
  expect_refusal("float.bin", "abcd", "dtype 7 of Megatron's index");
  write(folder / "lost.idx", megatron_index(8, {1}).substr(0, 36));
  expect_refusal("lost.bin", "ab", "has 36 bytes, too few for 1 sequences");
  write(folder / "other.idx", "an index of something else, and long enough");
  expect_refusal("other.bin", "ab", "is no index of Megatron's");
  write(folder / "torn.idx", megatron_index(8, {1}).substr(0, megatron_index(8, {1}).size() - 1));
  expect_refusal("torn.bin", "ab", "too few for");
  std::filesystem::create_directory(folder / "mixed");
  write(folder / "mixed/a.bin", "ab");
  write(folder / "mixed/a.idx", megatron_index(8, {1}));
  write(folder / "mixed/b.bin", "ab");
  EXPECT_THAT(message_of([&] { TokenFiles{folder / "mixed"}; }),
              HasSubstr("mixed/b.bin: has no index (.idx) of Megatron's"));
}

// At any part of the text what is true of all of it.
void expect_begins(const std::string& path, std::optional<int64_t> end, const Numbers& expected) {
  const TokenFiles files(path, DocumentMarks{.end = end});
  for (int64_t first = 0; first <= files.size(); ++first) {
    for (int64_t count = 0; first + count <= files.size(); ++count)
      EXPECT_EQ(files.document_begins(first, count), places_in(expected, first, count))
          << first << ", " << count;
  }
}

TEST(TokenFiles, DocumentsBeginAfterTheTokenThatEndsThem) {
  const TemporaryFolder folder;
  write(folder / "1.bin", bytes_of<uint16_t>({9, 1, 2, 9, 9, 3}));
  write(folder / "2.bin", bytes_of<uint16_t>({4, 9}));  // goes on with the one before
  write(folder / "3.bin", "");
  write(folder / "4.bin", llm_c_header(20240801, 7, 2) + bytes_of<uint32_t>({5, 9}));
  expect_begins(folder.path(), 9, {0, 1, 4, 5, 8});
  expect_begins(folder.path(), 4, {0, 7});
  expect_begins(folder.path(), 77, {0});
}

TEST(TokenFiles, DocumentsAreThoseOfMegatronsIndex) {
  const TemporaryFolder folder;
  write(folder / "a.bin", bytes_of<uint16_t>({1, 2, 3, 4, 9, 6}));
  // Two sequences, none, an empty one, one of one token, none at the end.
  write(folder / "a.idx", megatron_index(8, {2, 1, 0, 1, 2}, {0, 2, 2, 3, 4, 5, 5}));
  write(folder / "b.bin", bytes_of<uint16_t>({7, 8}));
  write(folder / "b.idx", megatron_index(8, {1, 1}));
  expect_begins(folder.path(), std::nullopt, {0, 3, 4, 6, 7});
  expect_begins(folder.path(), 9, {0, 3, 4, 5, 6, 7});
  EXPECT_EQ(TokenFiles(folder.path()).document_begins(0, 8), Numbers{});
}

TEST(TokenFiles, DocumentsThatNothingTellsOfAreRefused) {
  const TemporaryFolder folder;
  const auto refusal = [&] {
    return message_of([&] { TokenFiles(folder / "a.bin", DocumentMarks{}); });
  };
  write(folder / "a.bin", bytes_of<uint16_t>({1, 2, 3}));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("--end_of_document"), HasSubstr("a.bin has no index")));
  write(folder / "a.idx", megatron_index(8, {1, 2}, {0, 2, 1}));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("a.idx: document 2 begins with sequence 1"),
                               HasSubstr("allowed are 2 to 2")));
  write(folder / "a.idx", megatron_index(8, {1, 2}, {0, 3}));
  EXPECT_THAT(refusal(), HasSubstr("document 1 begins with sequence 3, allowed are 0 to 2"));
  write(folder / "a.idx", megatron_index(8, {1, 2}, {0, 1}));
  EXPECT_THAT(refusal(), HasSubstr("its documents have 1 sequences, and there are 2"));
  auto index = megatron_index(8, {1, 2}, {0, 2});
  index.pop_back();
  write(folder / "a.idx", index);
  EXPECT_THAT(refusal(), HasSubstr("a.idx: has 73 bytes, too few for 2 documents"));
  // Where documents do not matter, too.
  EXPECT_THAT(message_of([&] { TokenFiles{folder / "a.bin"}; }), HasSubstr("too few for 2"));
}

TEST(TokenFiles, TokensAboveTheVocabularyAreNamedWithTheirPlace) {
  const TemporaryFolder folder;
  write(folder / "1.bin", bytes_of<uint16_t>({1, 2, 3}));
  write(folder / "2.bin", bytes_of<uint16_t>({4, 99, 5}));
  EXPECT_EQ(read(folder.path(), 0, 4, 50), (Numbers{1, 2, 3, 4}));
  EXPECT_THAT(message_of([&] { read(folder.path(), 2, 4, 50); }),
              AllOf(HasSubstr("2.bin: token 1 is 99, and the vocabulary has 50")));
}

}  // namespace
}  // namespace programs
