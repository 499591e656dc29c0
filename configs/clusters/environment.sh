# Read by the shells of all nodes that `ray up` starts with the files beside this one.

. "$HOME/caravan/venv/bin/activate"

# Ray's commands to nodes set it to 1, and its workers would inherit that.
unset OMP_NUM_THREADS

# Joining the cluster, submitting jobs and the dashboard require the token.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$HOME/caravan/secrets/ray_token"

# HAProxy adds the secret to each request; the ingress refuses requests without it.
CARAVAN_PROXY_SECRET="$(cat "$HOME/caravan/secrets/proxy_secret")"
export CARAVAN_PROXY_SECRET
export RAY_SERVE_HAPROXY_BINARY_PATH="$HOME/caravan/venv/bin/caravan-haproxy"

# Each node has its own store. For one that all nodes share, mount a network file system that
# supports file locks (`initialization_commands`), and set its path here.
export CARAVAN_MODELS="$HOME/caravan/models"

# Threads of the CPU kernels sleep soon, as in `make serve`.
export GOMP_SPINCOUNT=1000
export RAY_worker_niceness=0
export RAY_USAGE_STATS_ENABLED=0
