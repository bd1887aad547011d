// Command testinit replaces capstan-init in the tests of capstand. It is PID 1 of a machine, serves its state, keeps a
// file on its disk, answers on port 6443 and executes commands that it gets over HTTP.
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

const data = "/run/capstan/bootstrap-data"

// The test sets another version in the build that replaces this one.
var version = "first"

func main() {
	fmt.Println("testinit starts")
	bootstrap := "Waiting"
	if content, err := os.ReadFile(data); err == nil {
		must(os.WriteFile("/var/lib/bootstrapped", content, 0o600))
		must(os.Remove(data))
		bootstrap = "Succeeded"
		if strings.Contains(string(content), "fail") {
			bootstrap = "Failed"
		}
	}
	must(os.MkdirAll("/var/log/capstan", 0o755))
	must(os.WriteFile("/var/log/capstan/test.log", []byte("one\ntwo\nthree\n"), 0o644))
	// A test may use the port as soon as the machine has its status.
	api, err := net.Listen("tcp", ":6443")
	must(err)
	go serveStatus(bootstrap)
	serveAPI(api)
}

// serveStatus serves the socket that capstand dials.
func serveStatus(bootstrap string) {
	listener, err := net.Listen("unix", "/run/capstan/init.sock")
	must(err)
	must(http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/pods/stop" {
			stopPods(r.URL.RawQuery)
			return
		}
		must(json.NewEncoder(w).Encode(map[string]any{
			"bootstrap": bootstrap, "bootstrapMessage": "",
			"services": []map[string]any{{"name": "test", "state": "ready", "pid": 1}},
		}))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})))
}

// stopPods takes as long as the file hold exists, like pods with a long grace period.
func stopPods(query string) {
	must(os.WriteFile("/tmp/asked", []byte(query), 0o644))
	for {
		if _, err := os.Stat("/tmp/hold"); err != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// serveAPI answers at the port of an API server: /readyz, and some commands of the tests.
func serveAPI(listener net.Listener) {
	mux := http.NewServeMux()
	hostname, _ := os.Hostname()
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, version) })
	mux.HandleFunc("/name", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, hostname) })
	mux.HandleFunc("/exit", func(http.ResponseWriter, *http.Request) { os.Exit(3) })
	mux.HandleFunc("/dial", func(w http.ResponseWriter, r *http.Request) {
		conn, err := net.DialTimeout("tcp", r.FormValue("to"), 3*time.Second)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		answer, _ := io.ReadAll(conn)
		_, _ = w.Write(answer)
	})
	mux.HandleFunc("/run", func(w http.ResponseWriter, r *http.Request) {
		out, err := exec.CommandContext(context.Background(), "/bin/sh", "-c", r.FormValue("command")).CombinedOutput()
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			out = append(out, err.Error()...)
		}
		_, _ = w.Write(out)
	})
	server := &http.Server{Handler: mux, TLSConfig: &tls.Config{Certificates: []tls.Certificate{selfSigned()}}}
	must(server.ServeTLS(listener, "", ""))
}

func selfSigned() tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func must(err error) {
	if err != nil {
		fmt.Println("testinit:", err)
		os.Exit(1)
	}
}
