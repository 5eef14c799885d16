// What LeakSanitizer is not to tell: LibTorch's zip reader loses its state when its
// constructor throws, which it does for files that are cut off. The sanitizer finds the
// function among the symbols that the program exports.
extern "C" [[gnu::visibility("default")]] const char* __lsan_default_suppressions() {
  return "leak:mz_zip_reader_init\nleak:mz_zip_reader_read_central_dir\n";
}
