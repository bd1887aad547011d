package machineaccess

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

// maxImage is the largest archive in tests.
const maxImage = 1 << 20

// endless is an archive without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// An archive reaches the host as it is, and no larger than the administrator permits. The event names the user.
func TestImages(t *testing.T) {
	f := newFixture(t)
	chunked := func(r io.Reader) io.Reader { return io.MultiReader(r) } // of an unknown size
	for name, test := range map[string]struct {
		archive io.Reader
		code    int
		says    string
		events  int
	}{
		"an archive":                 {strings.NewReader("echo:v1"), 200, `{"images":["echo:v1"]}`, 1},
		"an archive of unknown size": {chunked(strings.NewReader("echo:v1")), 200, "echo:v1", 1},
		"garbage":                    {strings.NewReader("garbage"), 400, "the archive is garbage", 1},
		"the largest":                {bytes.NewReader(bytes.Repeat([]byte("a"), maxImage)), 200, "aaaa", 1},
		"too large":                  {bytes.NewReader(make([]byte, maxImage+1)), 413, "at most 1048576 bytes", 0},
		"too large, of unknown size": {chunked(bytes.NewReader(make([]byte, maxImage+1))), 413, "at most 1048576 bytes", 1},
		"endless":                    {endless{}, 413, "--max-image-bytes", 1},
	} {
		t.Run(name, func(t *testing.T) {
			code, body, err := f.send(f.ctx, test.archive, http.MethodPost, accessapi.Path(f.mine, "one", accessapi.Images), "loader", f.frontProxyClient)
			if err != nil || code != test.code || !strings.Contains(body, test.says) {
				t.Errorf("%d %s %v, want %d and %q", code, body, err, test.code, test.says)
			}
			for range test.events {
				if event := <-f.recorder.Events; !strings.Contains(event, "User loader loads images") {
					t.Errorf("event %q", event)
				}
			}
			f.noImports()
		})
	}
	if _, loaded := f.host.Imports(); loaded != 3 {
		t.Errorf("the host has received %d archives to their ends, want 3", loaded)
	}
}

// noImports waits until the host receives no archive.
func (f *fixture) noImports() {
	f.Helper()
	expect.True(f, "the host waits for no archive", func() bool {
		receiving, _ := f.host.Imports()
		return receiving == 0
	})
}

// The end of a client, or of the manager, is no end of the archive.
func TestImagesOfALostClient(t *testing.T) {
	f := newFixture(t)
	for _, name := range []string{"the client leaves", "the archive breaks"} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(f.ctx)
			defer cancel()
			archive, feed := io.Pipe()
			done := make(chan error, 1)
			go func() {
				_, _, err := f.send(ctx, archive, http.MethodPost, accessapi.Path(f.mine, "one", accessapi.Images), "loader", f.frontProxyClient)
				done <- err
			}()
			_, err := feed.Write([]byte("echo:v1"))
			f.must(err)
			<-f.recorder.Events
			if name == "the client leaves" {
				cancel()
			}
			_ = feed.CloseWithError(errors.New("disk error"))
			if err := <-done; err == nil {
				t.Error("the client ended without an error")
			}
			f.noImports()
			if _, loaded := f.host.Imports(); loaded != 0 {
				t.Error("the host has taken a part of an archive for all of it")
			}
		})
	}
}

// A silent client does not keep its upload open: the end of the time for it ends a read.
func TestArchiveOfASilentClient(t *testing.T) {
	ended := make(chan error, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 50*time.Millisecond)
		defer cancel()
		body := &archive{r.Body, http.NewResponseController(w), ctx}
		defer context.AfterFunc(ctx, body.interrupt)()
		ended <- sendArchive(body, maxImage, func(*hostpb.LoadImageRequest) error { return nil })
	}))
	defer server.Close()
	silent, _ := io.Pipe()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, silent)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		if response, err := server.Client().Do(request); err == nil {
			response.Body.Close()
		}
	}()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "silent connection") {
		t.Errorf("%v", err)
	}
	_ = silent.Close()
}
