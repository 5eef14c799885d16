#include "programs/trainer/data/tokenizer.h"

#include "programs/trainer/data/sentence_piece.h"
#include "programs/trainer/data/text_data.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace programs {
namespace {

using fsdp::testing::message_of;
using fsdp::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kFixtures = "tests/programs/trainer/fixtures";  // write_tokenizer.py says what of

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_content(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::vector<int64_t> ids_of(const torch::Tensor& tokens) {
  const auto numbers = tokens.to(torch::kLong);
  return {numbers.const_data_ptr<int64_t>(), numbers.const_data_ptr<int64_t>() + numbers.numel()};
}

nlohmann::json found_by_transformers() {
  return nlohmann::json::parse(content_of(kFixtures + "/tokens.json"));
}

TEST(SentencePiece, GivesTheTokensOfTransformersAndTheTextAgain) {
  const SentencePiece tokenizer(kFixtures);
  EXPECT_EQ(tokenizer.vocab(), 384);
  for (const auto& found : found_by_transformers()) {
    const std::string text = found["text"];
    const auto tokens = tokenizer.encode(text);
    EXPECT_EQ(tokens.scalar_type(), torch::kInt);
    EXPECT_EQ(ids_of(tokens), found["tokens"].get<std::vector<int64_t>>()) << text;
    EXPECT_EQ(tokenizer.decode(tokens), text);
    EXPECT_EQ(tokenizer.decode(tokens.to(torch::kLong)), text);
  }
}

TEST(SentencePiece, LeavesOutTheFirstTokenWhereTheFolderSaysSo) {
  const TemporaryFolder folder;
  write_content(folder / "tokenizer.model", content_of(kFixtures + "/tokenizer.model"));
  const auto first = [&] {
    return SentencePiece(folder.path()).encode("some text")[0].item<int64_t>();
  };
  EXPECT_EQ(first(), 1);
  write_content(folder / "tokenizer_config.json", R"({"add_bos_token": true})");
  EXPECT_EQ(first(), 1);
  write_content(folder / "tokenizer_config.json", R"({"add_bos_token": false})");
  EXPECT_NE(first(), 1);
  write_content(folder / "tokenizer_config.json", "[");
  EXPECT_THAT(message_of(first), HasSubstr("tokenizer_config.json: is no JSON object"));
}

TEST(SentencePiece, TokensOfALargerModelAreUnknown) {
  const SentencePiece tokenizer(kFixtures);
  EXPECT_EQ(tokenizer.decode(torch::tensor({361, 384, 100000, 361})), "x \u2047  \u2047 x");
}

TEST(SentencePiece, FilesThatAreDamagedAreNamed) {
  const TemporaryFolder folder;
  const auto whole = content_of(kFixtures + "/tokenizer.model");
  for (const auto& content :
       {std::string(), std::string("IQ== 0\nIg== 1\n"), std::string(5000, '\xff'),
        whole.substr(0, 1000), whole.substr(0, 5700), whole.substr(0, whole.size() - 1)}) {
    write_content(folder / "tokenizer.model", content);
    EXPECT_THAT(message_of([&] { tokenizer_of(folder.path(), 384); }),
                AllOf(HasSubstr(folder / "tokenizer.model"),
                      HasSubstr("is no whole model of SentencePiece's")));
  }
}

TEST(Tokenizer, IsWhatTheFolderHas) {
  const TemporaryFolder folder;
  EXPECT_EQ(tokenizer_of("", 10)->vocab(), 256);
  EXPECT_EQ(tokenizer_of(folder.path(), 10)->vocab(), 256);
  EXPECT_EQ(tokenizer_of(kFixtures, 384)->vocab(), 384);
  EXPECT_EQ(tokenizer_of(kFixtures, 1000)->vocab(), 384);
  EXPECT_THAT(message_of([] { tokenizer_of(kFixtures, 383); }),
              HasSubstr("tokenizer.model has 384 tokens, and the model's vocabulary is 383"));
  for (const char* name : {"vocab.json", "tokenizer.json"}) {
    write_content(folder / name, "{}");
    EXPECT_THAT(message_of([&] { tokenizer_of(folder.path(), 384); }),
                AllOf(HasSubstr(folder.path()), HasSubstr(name), HasSubstr("file of tokens")));
  }
  write_content(folder / "tokenizer.model", content_of(kFixtures + "/tokenizer.model"));
  EXPECT_EQ(tokenizer_of(folder.path(), 384)->vocab(), 384);
}

TEST(Bytes, AreTokens) {
  const std::string text = "a\n\xff\x80z";
  EXPECT_EQ(ids_of(Bytes().encode(text)), (std::vector<int64_t>{97, 10, 255, 128, 122}));
  EXPECT_EQ(Bytes().decode(Bytes().encode(text).to(torch::kLong)), text);
}

TEST(Printable, HasNoControlCharactersAndOnlyWholeCharacters) {
  EXPECT_EQ(printable("plain\ttext\n"), "plain\ttext\n");
  EXPECT_EQ(printable("\x1b[1m\x7f\r"), "?[1m??");
  EXPECT_EQ(printable("Gr\u00fc\u00dfe \u4e16 \U0001f600"), "Gr\u00fc\u00dfe \u4e16 \U0001f600");
  EXPECT_EQ(printable("\xc2\x80 \xc2\x9b[1m \xc2\x9f"), "? ?[1m ?");  // C1
  EXPECT_EQ(printable("\u00a0\u00bf\u0480"), "\u00a0\u00bf\u0480");
  EXPECT_EQ(printable("\xc0\x9b"), "?");          // an escape in two bytes
  EXPECT_EQ(printable("\xc3"), "?");              // cut off
  EXPECT_EQ(printable("\xe4\xb8z"), "??z");       // of three bytes the last is missing
  EXPECT_EQ(printable("\x80\xff\xf8z"), "???z");  // begins none
}

// Two files, whose documents they are.
TEST(TextData, IsEncodedFileByFile) {
  const TemporaryFolder folder;
  const std::string first(70000, 'x'), second = "The end\n";
  write_content(folder / "1", first);
  write_content(folder / "2", "");
  write_content(folder / "3", second);
  write_content(folder / "4", std::string("no\0text", 7));
  const SentencePiece tokenizer(kFixtures);
  const TextData data(folder.path(), tokenizer);
  const auto expected = torch::cat({tokenizer.encode(first), tokenizer.encode(second)});
  EXPECT_TRUE(torch::equal(data.read(0, data.size(), 384), expected.to(torch::kLong)));
  const auto place = tokenizer.encode(first).numel();
  EXPECT_EQ(data.document_begins(0, data.size()), (std::vector<int64_t>{0, place}));
  EXPECT_EQ(data.document_begins(1, place - 1), std::vector<int64_t>{});
  EXPECT_THAT(message_of([&] { data.read(0, 1, 383); }), HasSubstr("need a vocabulary of 384"));

  const TextData bytes(folder.path(), Bytes());
  EXPECT_EQ(bytes.size(), static_cast<int64_t>(first.size() + second.size()));
  EXPECT_EQ(bytes.document_begins(0, bytes.size()), (std::vector<int64_t>{0, 70000}));
}

// As SentencePiece's is of spaces alone, where the model leaves these out.
class NoSpaces final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  torch::Tensor encode(const std::string& text) const override {
    const bool is_blank = text.find_first_not_of(' ') == std::string::npos;
    return Bytes().encode(is_blank ? "" : text);
  }
  std::string decode(const torch::Tensor& tokens) const override { return Bytes().decode(tokens); }
};

TEST(TextData, FilesWithoutTokensAreNoDocuments) {
  const TemporaryFolder folder;
  write_content(folder / "1", "  ");
  write_content(folder / "2", std::string(70000, 'x'));
  write_content(folder / "3", " ");
  write_content(folder / "4", "the end");
  const TextData data(folder.path(), NoSpaces());
  EXPECT_EQ(data.size(), 70007);
  EXPECT_EQ(data.document_begins(0, data.size()), (std::vector<int64_t>{0, 70000}));
  const TemporaryFolder blank;
  write_content(blank / "1", std::string(70000, ' '));
  EXPECT_THAT(message_of([&] { TextData(blank.path(), NoSpaces()); }),
              HasSubstr("--data: " + blank.path() + " has 70000 bytes of text, and no token"));
}

}  // namespace
}  // namespace programs
