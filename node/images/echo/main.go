// echo is the workload of our end-to-end tests: a server that says which pod it
// is, and the two clients that a test would otherwise need a shell for.
//
//	echo serve  [-listen :8080]             GET / pod name, GET /info JSON, GET /healthz ok
//	echo get    [-timeout 5s] [-for 0s] URL prints the body; exit 1 unless 2xx
//	echo lookup [-timeout 5s] [-for 0s] NAME  prints the addresses, one per line
//
// "-for" keeps trying for that long.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	// As PID 1 a signal without a handler is ignored.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	name := "serve"
	if len(args) > 0 {
		name, args = args[0], args[1:]
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	listen := ":8080"
	timeout, keepTrying := 5*time.Second, time.Duration(0)
	var try func(context.Context, string, io.Writer) error
	switch name {
	case "serve":
		flags.StringVar(&listen, "listen", listen, "address to listen on")
	case "get", "lookup":
		flags.DurationVar(&timeout, "timeout", timeout, "limit of one try")
		flags.DurationVar(&keepTrying, "for", keepTrying, "keep trying for this long")
		if try = get; name == "lookup" {
			try = lookup
		}
	default:
		return fmt.Errorf("unknown command %q; have: serve, get, lookup", name)
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if try == nil {
		return serve(ctx, listen)
	}
	if flags.NArg() != 1 {
		return fmt.Errorf("%s wants one argument, got %q", name, flags.Args())
	}

	deadline := time.Now().Add(keepTrying)
	for {
		tryCtx, cancel := context.WithTimeout(ctx, timeout)
		err := try(tryCtx, flags.Arg(0), stdout)
		cancel()
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond) // nothing announces that a Service has become reachable
	}
}

func podName() string {
	if name := os.Getenv("POD_NAME"); name != "" {
		return name
	}
	name, _ := os.Hostname()
	return name
}

func handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, podName())
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /info", func(w http.ResponseWriter, r *http.Request) {
		hostname, _ := os.Hostname()
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]string{
			"pod":      podName(),
			"hostname": hostname,
			"node":     os.Getenv("NODE_NAME"),
			"client":   r.RemoteAddr,
			"server":   fmt.Sprint(local),
			"host":     r.Host,
		})
	})
	return mux
}

func serve(ctx context.Context, listen string) error {
	server := &http.Server{Addr: listen, Handler: handler(), ReadHeaderTimeout: 5 * time.Second}
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func get(ctx context.Context, url string, stdout io.Writer) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	// A connection per try, so that a Service chooses its endpoint anew.
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("GET %s: %s: %s", url, response.Status, strings.TrimSpace(string(body)))
	}
	_, err = stdout.Write(body)
	return err
}

func lookup(ctx context.Context, name string, stdout io.Writer) error {
	addresses, err := net.DefaultResolver.LookupHost(ctx, name)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, strings.Join(addresses, "\n"))
	return err
}
