#include "programs/trainer/report/output_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace programs {
namespace {

namespace fs = std::filesystem;

// Where `path` leads to, over links, without a slash at its end.
std::string target_of(const std::string& path) {
  std::error_code error;
  const auto target = fs::weakly_canonical(fs::absolute(path), error);
  return error ? path : (target / "").parent_path().string();
}

bool written(const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (file.is_open()) write(file);
  file.close();
  return file.good();
}

// Neither a device nor a link to what is not there, which a new file would replace.
bool can_be_replaced(const std::string& path) {
  std::error_code error;
  const auto kind = fs::status(path, error).type();
  return kind == fs::file_type::regular ||
         (kind == fs::file_type::not_found && !fs::is_symlink(fs::symlink_status(path, error)));
}

}  // namespace

void check_output_file(const char* flag, const std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  const bool is_new = !fs::exists(path, error);
  errno = 0;
  const bool opens = std::ofstream(path, std::ios::app).is_open();
  TORCH_CHECK_VALUE(opens, flag, ": ", path, " cannot be written: ", std::strerror(errno));
  // What was made, and not a link that led to nothing before.
  if (is_new) std::remove(target_of(path).c_str());
}

void check_new_folder(const char* flag, const std::string& path) {
  if (path.empty()) return;
  TORCH_CHECK_VALUE(!fs::exists(path), flag, ": ", path, " is there already");
  std::vector<fs::path> made;  // the innermost first
  for (auto missing = (fs::absolute(path) / "").parent_path(); !fs::exists(missing);
       missing = missing.parent_path())
    made.push_back(missing);
  std::error_code error, ignored;
  for (auto folder = made.rbegin(); folder != made.rend() && !error; ++folder)
    fs::create_directory(*folder, error);
  for (const auto& folder : made) fs::remove(folder, ignored);
  TORCH_CHECK_VALUE(!error, flag, ": ", path, " cannot be made: ", error.message());
}

void check_is_not_read(const OutputFile& written, const OutputFile& read) {
  if (written.path.empty() || read.path.empty()) return;
  TORCH_CHECK_VALUE(!is_same_file(written.path, read.path), written.flag, ": ", written.path,
                    " would be written over, and ", read.flag, " reads it");
  const auto inside = fs::path(target_of(written.path)).lexically_relative(target_of(read.path));
  const bool lies_within = !inside.empty() && *inside.begin() != ".." && *inside.begin() != ".";
  std::error_code error;
  TORCH_CHECK_VALUE(!lies_within || !fs::exists(written.path, error), written.flag, ": ",
                    written.path, " would be written over, and it is in the folder of ", read.flag,
                    ", ", read.path);
}

bool is_same_file(const std::string& one, const std::string& other) {
  std::error_code error;
  return fs::equivalent(one, other, error) || target_of(one) == target_of(other);
}

void check_files_differ(const std::vector<OutputFile>& files) {
  for (auto one = files.begin(); one != files.end(); ++one) {
    for (auto other = files.begin(); other != one; ++other) {
      TORCH_CHECK_VALUE(
          one->path.empty() || other->path.empty() || !is_same_file(one->path, other->path),
          one->flag, ": ", one->path, " is the file of ", other->flag, ", ", other->path, ", too");
    }
  }
}

void write_output_file(const OutputFile& file, const std::function<void(std::ostream&)>& write) {
  const auto path = target_of(file.path), beside = path + ".tmp";
  const bool goes_beside =
      can_be_replaced(file.path) && std::ofstream(beside, std::ios::app).is_open();
  const bool is_written = written(goes_beside ? beside : file.path, write) &&
                          (!goes_beside || std::rename(beside.c_str(), path.c_str()) == 0);
  if (goes_beside && !is_written) std::remove(beside.c_str());
  TORCH_CHECK(is_written, file.flag, ": ", file.path, " cannot be written");
}

}  // namespace programs
