package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestServeAndGet(t *testing.T) {
	t.Setenv("POD_NAME", "web-1")
	server := httptest.NewServer(handler(""))
	defer server.Close()

	for path, want := range map[string]string{"/": "web-1\n", "/healthz": "ok\n"} {
		var out bytes.Buffer
		if err := run(t.Context(), []string{"get", server.URL + path}, &out); err != nil || out.String() != want {
			t.Errorf("get %s: %q, %v", path, out.String(), err)
		}
	}

	var out bytes.Buffer
	if err := run(t.Context(), []string{"get", server.URL + "/info"}, &out); err != nil {
		t.Fatal(err)
	}
	var info map[string]string
	if err := json.Unmarshal(out.Bytes(), &info); err != nil || info["pod"] != "web-1" || info["client"] == "" {
		t.Errorf("info: %v, %v", info, err)
	}

	err := run(t.Context(), []string{"get", server.URL + "/nothing"}, &out)
	if err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("a 404 must fail, got %v", err)
	}
}

// Lines are on the disk, in their order, and without a folder there is no such path.
func TestLines(t *testing.T) {
	dir := t.TempDir()
	server := httptest.NewServer(handler(dir))
	defer server.Close()
	post := func(url, line string) int {
		response, err := http.Post(url+"/lines", "text/plain", strings.NewReader(line))
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		return response.StatusCode
	}
	for _, line := range []string{"one", "two"} {
		if code := post(server.URL, line); code != http.StatusOK {
			t.Errorf("%s: %d", line, code)
		}
	}
	if code := post(server.URL, strings.Repeat("x", maxLine+1)); code != http.StatusInternalServerError {
		t.Errorf("a long line: %d", code)
	}
	var out bytes.Buffer
	if err := run(t.Context(), []string{"get", server.URL + "/lines"}, &out); err != nil || out.String() != "one\ntwo\n" {
		t.Errorf("lines %q, %v", out.String(), err)
	}
	without := httptest.NewServer(handler(""))
	defer without.Close()
	if code := post(without.URL, "one"); code != http.StatusNotFound {
		t.Errorf("without a folder: %d", code)
	}
}

func TestGetKeepsTrying(t *testing.T) {
	address := freeAddress(t)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	time.AfterFunc(200*time.Millisecond, func() { served <- run(ctx, []string{"serve", "-listen", address}, nil) })

	var out bytes.Buffer
	if err := run(t.Context(), []string{"get", "-for", "120s", "http://" + address}, &out); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve must end without an error when told to stop: %v", err)
	}
}

// freeAddress is below the range from which Linux takes the ports of outgoing connections, so that nobody takes it
// between its choice and its use.
func freeAddress(t *testing.T) string {
	t.Helper()
	for port := 29000; port < 30000; port++ {
		listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			_ = listener.Close()
			return listener.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

func TestLookup(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"lookup", "127.0.0.1"}, &out); err != nil || out.String() != "127.0.0.1\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"fly"}, {"get"}, {"lookup", "a", "b"}, {"get", "-wrong"}} {
		if err := run(t.Context(), args, nil); err == nil {
			t.Errorf("%q must fail", args)
		}
	}
}
