"""`LINES`: for each fault, the line of configuration that mends it in each proxy. A table, and its look-up.

tests/doctor/test_proxies.py runs nginx, Apache, Caddy and HAProxy with these faults planted, but for `UNTRIED`. The
lines of Traefik, AWS ALB and Cloudflare are what these are known for; no test runs them. docs/troubleshooting.md shows
the same table.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamserve.doctor.hops import ALB, APACHE, CADDY, CLOUDFLARE, HAPROXY, NGINX, TRAEFIK

SITE = "the web server"
NO_LINE = "no line: "  # what follows says why

LINES: Mapping[str, Mapping[str, str]] = {
    "buffered": {
        NGINX: "proxy_buffering off;  (and no proxy_ignore_headers X-Accel-Buffering)",
        APACHE: "remove output filters that collect responses (SetOutputFilter, SecResponseBodyAccess On)",
        CADDY: "remove buffer_responses (response_buffers), and encode from these paths",
        TRAEFIK: "remove the middlewares buffering and compress from this router",
        HAPROXY: "remove http-response wait-for-body",
        ALB: "target_type = instance or ip: a Lambda target sends whole responses only",
        CLOUDFLARE: "a cache rule for these paths: Bypass cache; Response buffering off (Enterprise)",
        SITE: "middleware that collects or compresses responses: keep it from text/event-stream",
    },
    "compressed": {
        NGINX: "gzip off;  (and no proxy_hide_header Content-Encoding)",
        APACHE: "SetEnv no-gzip 1",
        CADDY: "encode only for other paths: @rest not path /streams* /v1/* /jobs* /pipelines* /conversations*",
        TRAEFIK: "compress: excludedContentTypes: [text/event-stream]",
        HAPROXY: "compression type … without text/event-stream",
        CLOUDFLARE: "a compression rule for these paths: Disable compression",
        SITE: "middleware that compresses: keep it from text/event-stream",
    },
    "keepalives_lost": {
        CLOUDFLARE: "a cache rule for these paths: Bypass cache",
    },
    "cut_in_silence": {
        NGINX: "proxy_read_timeout 1h;",
        APACHE: "ProxyTimeout 3600  (and no timeout= at ProxyPass)",
        CADDY: "remove read_timeout and write_timeout from transport http and from the server",
        TRAEFIK: "entryPoints.<name>.transport.respondingTimeouts.writeTimeout: 0s",
        HAPROXY: "timeout server 1h",
        ALB: "idle_timeout.timeout_seconds = 3600",
        CLOUDFLARE: "STREAMS KEEPALIVE_SECONDS below 100; Proxy Read Timeout (Enterprise) for whole answers",
    },
    "http10": {
        NGINX: "proxy_http_version 1.1;",
        APACHE: "remove SetEnv force-proxy-request-1.0",
    },
    "no_http2": {
        NGINX: "listen 443 ssl http2;",
        APACHE: "Protocols h2 http/1.1",
        CADDY: "servers { protocols h1 h2 }",
        HAPROXY: "bind :443 ssl crt … alpn h2,http/1.1",
        ALB: "routing.http2.enabled = true",
        CLOUDFLARE: "Speed › Protocol Optimization › HTTP/2: on",
    },
    "host_changed": {
        NGINX: "proxy_set_header Host $http_host;",
        APACHE: "ProxyPreserveHost On",
        CADDY: "remove header_up Host",
        TRAEFIK: "loadBalancer.passHostHeader: true",
        HAPROXY: "remove http-request set-header Host",
        ALB: "routing.http.preserve_host_header.enabled = true",
        CLOUDFLARE: "remove the origin rule that overrides the Host header",
        SITE: "USE_X_FORWARDED_HOST = True in Django's settings, where the proxy cannot pass Host",
    },
    "scheme_unknown": {
        NGINX: "proxy_set_header X-Forwarded-Proto $scheme;",
        APACHE: "RequestHeader set X-Forwarded-Proto expr=%{REQUEST_SCHEME}",
        CADDY: "servers { trusted_proxies static private_ranges }, where another proxy ends TLS",
        TRAEFIK: "entryPoints.<name>.forwardedHeaders.trustedIPs, where another proxy ends TLS",
        HAPROXY: "http-request set-header X-Forwarded-Proto https if { ssl_fc }",
        SITE: 'SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") in Django\'s settings',
    },
    "authorization_lost": {
        NGINX: "proxy_set_header Authorization $http_authorization;",
        APACHE: "remove RequestHeader unset Authorization",
        CADDY: "remove header_up -Authorization",
        TRAEFIK: "remove basicAuth.removeHeader and customRequestHeaders of Authorization",
        HAPROXY: "remove http-request del-header Authorization",
    },
    "last_event_id_lost": {
        NGINX: "proxy_set_header Last-Event-ID $http_last_event_id;",
        APACHE: "remove RequestHeader unset Last-Event-ID",
        CADDY: "remove header_up -Last-Event-ID",
        TRAEFIK: "remove customRequestHeaders of Last-Event-ID",
        HAPROXY: "remove http-request del-header Last-Event-ID",
    },
    "address_lost": {
        NGINX: "proxy_set_header X-Forwarded-For $remote_addr;",
        APACHE: "ProxyAddHeaders On",
        CADDY: "remove header_up -X-Forwarded-For",
        HAPROXY: "http-request set-header X-Forwarded-For %[src]",
        ALB: "routing.http.xff_header_processing.mode = append",
    },
    "address_claimed": {
        NGINX: "proxy_set_header X-Forwarded-For $remote_addr;",
        APACHE: "RequestHeader unset X-Forwarded-For early",
        CADDY: "remove header_up X-Forwarded-For and trusted_proxies of addresses that are not yours",
        TRAEFIK: "entryPoints.<name>.forwardedHeaders.insecure: false",
        HAPROXY: "http-request set-header X-Forwarded-For %[src]  (in place of option forwardfor)",
        ALB: "set_real_ip_from and real_ip_recursive in the proxy behind it",
        SITE: "believe the header of your proxy alone: uvicorn --forwarded-allow-ips",
    },
    "address_unused": {
        CLOUDFLARE: "in the proxy behind it: real_ip_header CF-Connecting-IP; and set_real_ip_from its addresses",
        SITE: "--proxy-headers, of uvicorn and of daphne",
    },
    "content_type_changed": {
        NGINX: "remove proxy_hide_header Content-Type and add_header Content-Type",
        APACHE: "remove Header set Content-Type and ForceType",
        CADDY: "remove header_down Content-Type",
        HAPROXY: "remove http-response set-header Content-Type",
    },
    "cacheable": {
        NGINX: "remove expires and proxy_hide_header Cache-Control; proxy_cache off;",
        APACHE: "remove Header set Cache-Control, ExpiresActive and CacheEnable for these paths",
        CADDY: "remove header_down Cache-Control",
        HAPROXY: "remove http-response set-header Cache-Control",
        CLOUDFLARE: "a cache rule for these paths: Bypass cache; Browser TTL: Respect origin",
    },
    "stream_id_lost": {
        NGINX: "remove proxy_hide_header X-Stream-Id",
        APACHE: "remove Header unset X-Stream-Id",
        CADDY: "remove header_down -X-Stream-Id",
        HAPROXY: "remove http-response del-header X-Stream-Id",
    },
    "no_upgrade": {
        NGINX: 'proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";',
        APACHE: "ProxyPass … upgrade=websocket  (2.4.47 and later; mod_proxy_wstunnel before)",
        CADDY: "remove header_up -Upgrade, header_up -Connection and buffer_responses",
        TRAEFIK: "remove customRequestHeaders of Upgrade and Connection",
        HAPROXY: "remove http-request del-header Upgrade",
        ALB: "a target group of protocol HTTP1",
        CLOUDFLARE: "Network › WebSockets: on",
        SITE: "pip install websockets, which uvicorn needs; application = streamserve.routing.wrap(application)",
    },
    "socket_refused": {
        SITE: "CSRF_TRUSTED_ORIGINS, and a proxy that passes Host on",
    },
    "socket_cut": {
        NGINX: "proxy_read_timeout 1h;",
        CADDY: "remove read_timeout from transport http, and stream_timeout",
        TRAEFIK: "entryPoints.<name>.transport.respondingTimeouts.idleTimeout: 3600s",
        HAPROXY: "timeout tunnel 1h",
        ALB: "idle_timeout.timeout_seconds = 3600",
        CLOUDFLARE: 'STREAMSERVE["STREAMS"]["PING_SECONDS"] = 30',
    },
    "disconnect_unseen": {
        NGINX: "proxy_ignore_client_abort off;",
        APACHE: "remove output filters that collect responses (SetOutputFilter, SecResponseBodyAccess On)",
        CADDY: "remove flush_interval -1: with it, Caddy goes on asking for readers that have left",
        HAPROXY: "option abortonclose",
        SITE: "serve the site by uvicorn or daphne, with streamserve.routing.wrap",
    },
    "whole_disconnect_unseen": {
        NGINX: "proxy_ignore_client_abort off;",
        APACHE: NO_LINE
        + "Apache sees that a reader has left when it next writes, and of a whole answer that is its end",
        CADDY: "remove flush_interval -1: with it, Caddy goes on asking for readers that have left",
        HAPROXY: "option abortonclose",
        SITE: "serve the site by uvicorn or daphne, with streamserve.routing.wrap",
    },
    "resume_broken": {
        SITE: "all web processes of a site name the same STATE_DIR (or LOG) and database",
    },
}

# Lines of proxies that tests run which no test has planted.
UNTRIED = frozenset(
    {
        *((proxy, "disconnect_unseen") for proxy in (NGINX, APACHE, CADDY, HAPROXY)),
        *((proxy, "scheme_unknown") for proxy in (APACHE, CADDY, HAPROXY)),
        *((proxy, "no_http2") for proxy in (APACHE, CADDY, HAPROXY)),
        (HAPROXY, "compressed"),
    }
)


def line_for(fault: str, proxy: str) -> str:
    """Return the line that mends a fault in a proxy, "" where the table has none."""
    return LINES.get(fault, {}).get(proxy, "")
