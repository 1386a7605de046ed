# Read by the build of llama-cpp-python after its project() line: build the library alone, in less time.

# Its CMakeLists.txt sets LLAMA_BUILD_COMMON in the cache and by force; a plain variable takes precedence (CMP0126).
# fidelab calls libllama and ggml only: neither the helpers of llama.cpp's programs nor mtmd (images).
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)

# libllama builds graphs and keeps books; the kernels are in ggml, which stays at -O3.  Its files share the headers of
# the standard library, which are the larger part of what is parsed.
function(fidelab_build_less)
  if(TARGET llama AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(llama PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O2>)
    target_precompile_headers(
      llama PRIVATE <algorithm> <cmath> <cstring> <fstream> <functional> <map> <memory> <queue> <random> <regex> <set>
      <sstream> <stdexcept> <string> <thread> <unordered_map> <vector>)
  endif()
endfunction()
cmake_language(DEFER CALL fidelab_build_less)
