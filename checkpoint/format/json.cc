#include "checkpoint/format/json.h"

#include "checkpoint/files/errors.h"

#include <exception>
#include <limits>
#include <set>
#include <stdexcept>

namespace fsdp::internal::checkpoint {
namespace {

constexpr size_t kDeepest = 100;  // objects and lists in one another

// Sees every key as it is parsed, and stops at a repeated one. Builds nothing: nlohmann's
// own parse with a callback looks through a whole object at the end of each of its
// members.
class KeyWatch final : public nlohmann::json_sax<Json> {
 public:
  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    error_ = "key '" + key + "' stands there twice";
    return false;
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    error_ = "not JSON: " + plain_text_of(error);
    return false;
  }

 private:
  bool open() {
    keys_.emplace_back();
    if (keys_.size() <= kDeepest) return true;
    error_ = "not JSON that is read: it is nested too deep";
    return false;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of what is open
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> parse_json(std::string_view text, const std::string& what) {
  KeyWatch watch;
  if (!Json::sax_parse(text, &watch)) return absl::DataLossError(what + ": " + watch.error());
  try {
    return Json::parse(text);
  } catch (const std::exception& error) {
    return absl::DataLossError(what + ": not JSON: " + plain_text_of(error));
  }
}

std::vector<int64_t> integers_of(const Json& json) {
  if (!json.is_array()) throw std::runtime_error(json.dump() + " is no list of numbers");
  std::vector<int64_t> numbers;
  for (const Json& each : json) {
    constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    const bool is_too_large = each.is_number_unsigned() && each.get<uint64_t>() > kMost;
    if (!each.is_number_integer() || is_too_large) {
      throw std::runtime_error(json.dump() + " holds " + each.dump() + ", which is no number " +
                               "that a size or an offset can be");
    }
    numbers.push_back(each.get<int64_t>());
  }
  return numbers;
}

}  // namespace fsdp::internal::checkpoint
