# The demo site in a container, as `make run` serves it:
#
#     docker compose up          # then http://127.0.0.1:8000/
#
# docs/deploy.md has the lines for a site of your own, and what a container changes.
FROM python:3.11-slim

# The engine compiles its kernels for the processor on which it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home demo

WORKDIR /srv/demo
# First what changes seldom: the packages, with PyTorch's CPU build.
COPY requirements.txt ./
COPY project/install.py project/
RUN python project/install.py --venv /srv/venv -r requirements.txt

COPY . .
RUN mkdir -m 700 /srv/state && chown demo /srv/state
USER demo
RUN /srv/venv/bin/python -m streamserve.native.build

# All interfaces of the container; compose.yaml publishes the port on loopback only.
ENV HOST=0.0.0.0 PORT=8000 STREAMSERVE_STATE_DIR=/srv/state PYTHONUNBUFFERED=1
EXPOSE 8000
VOLUME /srv/state
CMD ["/srv/venv/bin/python", "manage.py", "demo"]
