# An engine that talks to kvd: vLLM's image with kvd's client in it, the same version
# as the daemon. docker build -f docker/vllm.Dockerfile -t vllm-kvd .
ARG KVD=kvd:0.1.0
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM ${KVD} AS kvd

FROM ${VLLM}
COPY --from=kvd /opt/kvd/wheels /tmp/wheels
RUN python3 -m pip install --no-cache-dir "$(echo /tmp/wheels/kvd_offload-*.whl)[cuda]" \
 # For `kvd doctor --engine`; vLLM has what the command needs.
 && python3 -m pip install --no-cache-dir --no-deps /tmp/wheels/kvd_offload_tools-*.whl
