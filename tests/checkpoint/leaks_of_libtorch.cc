// What LeakSanitizer is not to tell: LibTorch's zip reader loses its state when its
// constructor throws, which it does for files that are cut off.
extern "C" const char* __lsan_default_suppressions() {
  return "leak:mz_zip_reader_init\nleak:mz_zip_reader_read_central_dir\n";
}
