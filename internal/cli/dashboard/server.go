package dashboard

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"capstan.dev/capstan/internal/wakeup"
)

//go:embed assets
var assets embed.FS

const (
	// maxStreams is the number of open pages.
	maxStreams = 16
	// heartbeat is the pause after which an unchanged page gets a sign of life. The page expects it.
	heartbeat = 10 * time.Second
	// writeTimeout ends the connection of a browser that does not read.
	writeTimeout = 20 * time.Second
)

// files are the parts of the page: their names in URLs, in assets, and their types.
var files = map[string]struct{ name, contentType string }{
	"":          {"index.html", "text/html; charset=utf-8"},
	"app.js":    {"app.js", "text/javascript; charset=utf-8"},
	"style.css": {"style.css", "text/css; charset=utf-8"},
	"icon.svg":  {"icon.svg", "image/svg+xml"},
}

// headers of all answers. The page runs only its own script, reaches only this server, cannot be framed, and cannot turn a text into
// HTML or code, not even by mistake.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
		"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer", // the address contains the token
	"Cache-Control":                "no-store",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Permissions-Policy":           "camera=(), microphone=(), geolocation=()",
}

// server serves the page to clients that have its token. Other users of the box can also connect to loopback, and any web page can send
// requests to it.
type server struct {
	port  int
	token string

	mutex    sync.Mutex
	sections map[string]section
	version  int64
	streams  map[wakeup.Signal]bool
}

// section is a part of the page. version grows with each change.
type section struct {
	data    []byte
	version int64
}

func newServer(port int) *server {
	return &server{port: port, token: rand.Text(), sections: map[string]section{}, streams: map[wakeup.Signal]bool{}}
}

func (s *server) url() string { return fmt.Sprintf("http://127.0.0.1:%d/%s/", s.port, s.token) }

func (s *server) http(ctx context.Context) *http.Server {
	return &http.Server{
		Handler: s, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx }, // ends the streams
	}
}

// serves reports whether a request is for a name of this server. A request with another name is one of a page whose name resolves to
// loopback (DNS rebinding).
func (s *server) serves(host string) bool {
	port := strconv.Itoa(s.port)
	return slices.Contains([]string{net.JoinHostPort("127.0.0.1", port), net.JoinHostPort("localhost", port)}, host)
}

// ServeHTTP serves the page, its parts and the stream of changes below the token.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range headers {
		w.Header().Set(name, value)
	}
	if !s.serves(r.Host) {
		http.Error(w, fmt.Sprintf("expected a request to 127.0.0.1:%d, found another host name: open the address that `capstan dashboard` printed", s.port), http.StatusForbidden)
		return
	}
	token, name, below := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if !below || subtle.ConstantTimeCompare([]byte(token), []byte(s.token)) != 1 {
		http.Error(w, "expected the address that `capstan dashboard` printed, found another path: the address changes with each start of the command", http.StatusNotFound)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "expected GET or HEAD: the page only reads", http.StatusMethodNotAllowed)
		return
	}
	if name == "stream" {
		s.stream(w, r)
		return
	}
	file, found := files[name]
	if !found {
		http.NotFound(w, r)
		return
	}
	data, err := assets.ReadFile("assets/" + file.name)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", file.contentType)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
}

// publish replaces the sections that changed, and wakes the streams.
func (s *server) publish(sections map[string][]byte) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.version++
	changed := false
	for name, data := range sections {
		if old, found := s.sections[name]; !found || !bytes.Equal(old.data, data) {
			s.sections[name] = section{data, s.version}
			changed = true
		}
	}
	for stream := range s.streams {
		if changed {
			stream.Send()
		}
	}
}

// open adds a stream, unless there are too many.
func (s *server) open() (stream wakeup.Signal, closing func(), ok bool) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if len(s.streams) >= maxStreams {
		return nil, nil, false
	}
	stream = wakeup.New()
	s.streams[stream] = true
	return stream, func() {
		s.mutex.Lock()
		defer s.mutex.Unlock()
		delete(s.streams, stream)
	}, true
}

// since returns the sections that changed after a version as server-sent events, and the present version.
func (s *server) since(version int64) (events []byte, now int64) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var out bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(s.sections)) {
		if part := s.sections[name]; part.version > version {
			fmt.Fprintf(&out, "event: %s\ndata: %s\n\n", name, part.data) // JSON has no line breaks
		}
	}
	if out.Len() > 0 {
		out.WriteString("event: complete\ndata: {}\n\n")
	}
	return out.Bytes(), s.version
}

// stream sends all sections, then those that change, until the browser leaves.
func (s *server) stream(w http.ResponseWriter, r *http.Request) {
	changed, closing, ok := s.open()
	if !ok {
		http.Error(w, fmt.Sprintf("expected at most %d open pages: close one", maxStreams), http.StatusServiceUnavailable)
		return
	}
	defer closing()
	w.Header().Set("Content-Type", "text/event-stream")
	if r.Method == http.MethodHead {
		return
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // that of the request
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	version := int64(0)
	for first := true; ; first = false {
		events, now := s.since(version)
		if len(events) == 0 && !first {
			events = []byte("event: alive\ndata: {}\n\n")
		}
		version = now
		if control.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil {
			return
		}
		if _, err := w.Write(append([]byte("retry: 2000\n\n"), events...)); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		case <-beat.C:
		}
	}
}
