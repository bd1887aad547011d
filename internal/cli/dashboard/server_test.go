package dashboard

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
)

func TestRequests(t *testing.T) {
	s := newServer(4711)
	page := "/" + s.token + "/"
	for name, test := range map[string]struct {
		method, host, path string
		status             int
	}{
		"the page":                      {"GET", "127.0.0.1:4711", page, 200},
		"localhost":                     {"GET", "localhost:4711", page + "app.js", 200},
		"head":                          {"HEAD", "127.0.0.1:4711", page, 200},
		"head of the stream ends":       {"HEAD", "127.0.0.1:4711", page + "stream", 200},
		"another name (DNS rebinding)":  {"GET", "evil.example:4711", page, 403},
		"another port":                  {"GET", "127.0.0.1:4712", page, 403},
		"no port":                       {"GET", "127.0.0.1", page, 403},
		"a name that begins like it":    {"GET", "127.0.0.1:4711.evil.example", page, 403},
		"no host":                       {"GET", "", page, 403},
		"no token":                      {"GET", "127.0.0.1:4711", "/", 404},
		"no token before a file":        {"GET", "127.0.0.1:4711", "/app.js", 404},
		"another token":                 {"GET", "127.0.0.1:4711", "/" + strings.Repeat("A", len(s.token)) + "/", 404},
		"a part of the token":           {"GET", "127.0.0.1:4711", "/" + s.token[:25] + "/", 404},
		"an empty token":                {"GET", "127.0.0.1:4711", "//", 404},
		"the token as a file":           {"GET", "127.0.0.1:4711", "/" + s.token, 404},
		"another token for the stream":  {"GET", "127.0.0.1:4711", "/x/stream", 404},
		"another file":                  {"GET", "127.0.0.1:4711", page + "model.go", 404},
		"a file outside":                {"GET", "127.0.0.1:4711", page + "../../etc/passwd", 404},
		"post":                          {"POST", "127.0.0.1:4711", page, 405},
		"post to the stream":            {"POST", "127.0.0.1:4711", page + "stream", 405},
		"delete":                        {"DELETE", "127.0.0.1:4711", page + "app.js", 405},
		"options, as a CORS check does": {"OPTIONS", "127.0.0.1:4711", page, 405},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(test.method, "http://x"+test.path, nil)
			r.Host = test.host
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			if w.Code != test.status {
				t.Errorf("status %d, want %d", w.Code, test.status)
			}
			for header, want := range headers {
				if got := w.Header().Get(header); got != want {
					t.Errorf("%s: %q, want %q", header, got, want)
				}
			}
			if w.Header().Get("Access-Control-Allow-Origin") != "" || strings.Contains(w.Body.String(), s.token) {
				t.Error("the answer gives access to other sites, or contains the token")
			}
		})
	}
	if other := newServer(4711); other.token == s.token || len(s.token) < 26 {
		t.Errorf("tokens %q and %q", s.token, other.token)
	}
}

// TestPolicy: the page needs nothing that the policy refuses, and the policy permits no foreign site and no inline code.
func TestPolicy(t *testing.T) {
	policy := headers["Content-Security-Policy"]
	for _, want := range []string{"default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"} {
		if !strings.Contains(policy, want) {
			t.Errorf("the policy lacks %s", want)
		}
	}
	if regexp.MustCompile(`unsafe|\*|https?:|data:`).MatchString(policy) {
		t.Errorf("the policy is too wide: %s", policy)
	}
	forbidden := map[string]*regexp.Regexp{
		"index.html": regexp.MustCompile(`(?i)\son\w+=|style=|<style|<script(?: [^>]*)?>[^<]|https?://|//[a-z]`),
		"app.js":     regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|\.srcdoc|DOMParser|\.style\b`),
		"style.css":  regexp.MustCompile(`url\(|@import`),
	}
	for name, pattern := range forbidden {
		data, err := assets.ReadFile("assets/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if found := pattern.FindString(string(data)); found != "" {
			t.Errorf("%s contains %q", name, found)
		}
	}
}

// served starts the server on a real port.
func served(t *testing.T) *server {
	t.Helper()
	s := newServer(0)
	web := httptest.NewUnstartedServer(s)
	web.Config = s.http(t.Context())
	web.Start()
	t.Cleanup(web.Close)
	if _, err := fmt.Sscanf(web.URL, "http://127.0.0.1:%d", &s.port); err != nil {
		t.Fatal(err)
	}
	return s
}

func get(ctx context.Context, t *testing.T, url string) (status int, body *bufio.Reader) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answer.Body.Close() })
	return answer.StatusCode, bufio.NewReader(answer.Body)
}

// next returns the names of the events up to the next one called end.
func next(t *testing.T, lines *bufio.Reader, end string) (names []string) {
	t.Helper()
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "event: "); ok {
			if names = append(names, name); name == end {
				return names
			}
		}
	}
}

func TestStream(t *testing.T) {
	s := served(t)
	s.publish(map[string][]byte{"hosts": []byte("[1]"), "pools": []byte("[]")})
	ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
	defer cancel()
	_, lines := get(ctx, t, s.url()+"stream")
	if got := strings.Join(next(t, lines, "complete"), " "); got != "hosts pools complete" {
		t.Errorf("first: %s, want all sections", got)
	}
	s.publish(map[string][]byte{"hosts": []byte("[2]"), "pools": []byte("[]")})
	if got := strings.Join(next(t, lines, "complete"), " "); got != "hosts complete" {
		t.Errorf("after a change: %s, want only what changed", got)
	}
}

func TestStreamsAreBounded(t *testing.T) {
	s := served(t)
	s.publish(map[string][]byte{"hosts": []byte("[]")})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxStreams {
		_, lines := get(ctx, t, s.url()+"stream")
		next(t, lines, "complete")
	}
	if status, _ := get(ctx, t, s.url()+"stream"); status != http.StatusServiceUnavailable {
		t.Errorf("one stream too many: status %d, want 503", status)
	}
	cancel()
	expect.True(t, "no stream is left after their pages closed", func() bool {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		return len(s.streams) == 0
	})
	_, page := get(t.Context(), t, s.url())
	if text, err := io.ReadAll(page); err != nil || !strings.Contains(string(text), "<main") {
		t.Errorf("the page: %v, %s", err, text)
	}
}
