# Runs the tests of the kernels as on several processors, by the pytest command that is given, and says of each how it ended.
#
# Torch, MKL, oneDNN, NumPy's BLAS and the kernels choose their code by the processor: the bits of a product depend on it, and
# its error. Their variables have them choose as on an older one, MKL's on Intel's alone. Only Triton's interpreter multiplies
# by NumPy, and not by MKL and oneDNN. What starts a compiler and looks at what that has made, and what measures memory, is
# left to `make test`.
#
# Not imitated: instructions that this processor lacks; caches of another size, by which the libraries cut products into
# blocks; more processors, though tests have more threads; and MKL on a processor that is not Intel's.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA TRITON_INTERPRET
unset MKL_ENABLE_INSTRUCTIONS MKL_CBWR EXGRPO_CPU_ISA EXGRPO_CPU_PRODUCT
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
output=$folder/output status=0
while read -r setting; do
	# What torch.compile has made for one setting it would take for the others too.
	if env TORCHINDUCTOR_CACHE_DIR="$(mktemp -d "$folder/XXXX")" $setting "$@" tests/kernels -q -rfE -W ignore::RuntimeWarning \
		--ignore-glob='*compile*' --ignore-glob='*sanitized.py' --ignore-glob='*extension.py' \
		--ignore-glob='*memory.py' >"$output" 2>&1
	then result=passed; else result=FAILED status=1; fi
	echo "$result  ${setting:-as it is}: $(tail -n 1 "$output")"
	[ $result = passed ] || grep -E '^(FAILED|ERROR)' "$output"
done <<'SETTINGS'

ATEN_CPU_CAPABILITY=default
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 EXGRPO_CPU_ISA=avx2 EXGRPO_CPU_PRODUCT=none
ONEDNN_MAX_CPU_ISA=AVX512_CORE EXGRPO_CPU_PRODUCT=none
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
MKL_CBWR=AVX2,STRICT
taskset -c 0
TRITON_INTERPRET=1
TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Haswell
TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Zen
TRITON_INTERPRET=1 OPENBLAS_CORETYPE=SkylakeX
TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 taskset -c 0
SETTINGS
exit $status
