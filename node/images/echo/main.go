// echo is the workload of our end-to-end tests: a server that says which pod it
// is, and the two clients that a test would otherwise need a shell for.
//
//	echo serve  [-listen :8080] [-data DIR] GET / pod name, GET /info JSON, GET /healthz ok.
//	                                        With -data also POST /lines, which adds the body as a line to the file
//	                                        DIR/lines and answers when it is on the disk, and GET /lines.
//	                                        It answers UDP datagrams on the same port with the address of the sender.
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
	"path/filepath"
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
	listen, data := ":8080", ""
	timeout, keepTrying := 5*time.Second, time.Duration(0)
	var try func(context.Context, string, io.Writer) error
	switch name {
	case "serve":
		flags.StringVar(&listen, "listen", listen, "address to listen on")
		flags.StringVar(&data, "data", data, "folder of the file with the lines")
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
		return serve(ctx, listen, data)
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

// maxLine limits a line in bytes.
const maxLine = 1 << 10

// handler serves the pod's name and, with a folder for data, its lines.
func handler(data string) http.Handler {
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
	if data != "" {
		lines := filepath.Join(data, "lines")
		mux.HandleFunc("GET /lines", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, lines) })
		mux.HandleFunc("POST /lines", func(w http.ResponseWriter, r *http.Request) {
			line, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxLine))
			if err == nil {
				err = appendLine(lines, line)
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		})
	}
	return mux
}

// appendLine returns when the line is on the disk.
func appendLine(path string, line []byte) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Sync(), f.Close())
}

func serve(ctx context.Context, listen, data string) error {
	datagrams, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", listen)
	if err != nil {
		return err
	}
	go answerDatagrams(datagrams)
	server := &http.Server{Addr: listen, Handler: handler(data), ReadHeaderTimeout: 5 * time.Second}
	go func() {
		<-ctx.Done()
		_, _ = datagrams.Close(), server.Close()
	}()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// answerDatagrams answers with the address of the sender until the socket is closed.
func answerDatagrams(conn net.PacketConn) {
	buffer := make([]byte, maxLine)
	for {
		_, from, err := conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = fmt.Fprintln(writerTo{conn, from}, from)
		}
	}
}

// writerTo sends datagrams to one address.
type writerTo struct {
	net.PacketConn
	to net.Addr
}

func (w writerTo) Write(data []byte) (int, error) { return w.WriteTo(data, w.to) }

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
