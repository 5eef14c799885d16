// Files and folders that a run writes at its end, tried at its start.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace programs {

// Throws ValueError, naming the flag and the path, unless a file can be written there.
// What is there stays; where nothing is, nothing is left. Empty: no file. Local.
void check_output_file(const char* flag, const std::string& path);

// The same of a folder that is to be made.
void check_new_folder(const char* flag, const std::string& path);

struct OutputFile {
  const char* flag;
  std::string path;  // empty: none
};

// Throws ValueError, naming both flags, where `written` is `read`, or a file that is
// there in the folder `read`. Local.
void check_is_not_read(const OutputFile& written, const OutputFile& read);

// Whether both paths lead to one file, which need not be there. Local.
bool is_same_file(const std::string& one, const std::string& other);

// Throws ValueError, naming both flags, where two are one file. Local.
void check_files_differ(const std::vector<OutputFile>& files);

// What was there stays until all of the new is on the disk, beside it as "path.tmp".
// Throws c10::Error, naming the flag and the path, where that fails. Local.
void write_output_file(const OutputFile& file, const std::function<void(std::ostream&)>& write);

}  // namespace programs
