# To be sourced by scripts with a folder "$work": a headless Chromium, where there is one that works.

# Chromium with the options $@.
chromium_with() {
  HOME=$work timeout 60 chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --host-resolver-rules="MAP * ~NOTFOUND" --enable-logging=stderr --virtual-time-budget=2000 --window-size=1180,3000 "$@"
}

# Of a snap there may be a command alone.
browser_works() {
  command -v chromium > /dev/null || return 1
  echo "<script>document.write('wo' + 'rks')</script>" > "$work/trivial.html"
  chromium_with --dump-dom "file://$work/trivial.html" 2> /dev/null | grep --quiet works
}
