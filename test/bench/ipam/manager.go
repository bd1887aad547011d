package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/ipam"
	"capstan.dev/capstan/internal/reconciling"
)

// stats are the statistics of the manager process.
type stats struct {
	Record int            // writes of pools: the record and its counts
	Writes map[string]int // all other writes, by method and resource
	RSS    uint64         // bytes
}

func (s stats) claimWrites() int {
	n := 0
	for _, w := range s.Writes {
		n += w
	}
	return n
}

// counter counts the write requests.
type counter struct {
	next http.RoundTripper
	mu   sync.Mutex
	s    stats
}

func (c *counter) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet {
		c.count(req)
	}
	return c.next.RoundTrip(req)
}

func (c *counter) count(req *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if strings.Contains(req.URL.Path, "capstanippools/") {
		c.s.Record++
		return
	}
	c.s.Writes[req.Method+" "+resource(req.URL.Path)]++
}

var resourcePath = regexp.MustCompile(`(ipaddressclaims|ipaddresses|events|leases)(/[^/]+)?(/status)?`)

func resource(path string) string {
	m := resourcePath.FindStringSubmatch(path)
	if m == nil {
		return path
	}
	return m[1] + m[3]
}

func newScheme() (*k8sruntime.Scheme, error) {
	scheme := k8sruntime.NewScheme()
	return scheme, errors.Join(clientgoscheme.AddToScheme(scheme), clusterv1.AddToScheme(scheme), capiipamv1.AddToScheme(scheme), ipamv1.AddToScheme(scheme))
}

// runManager is the manager process. It answers each line on its standard input with its statistics.
func runManager(ctx context.Context, kubeconfig, namespace, pprof string, workers int) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	count := &counter{s: stats{Writes: map[string]int{}}}
	config.QPS = -1
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { count.next = rt; return count })
	scheme, err := newScheme()
	if err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:           scheme,
		Metrics:          server.Options{BindAddress: "0"},
		PprofBindAddress: pprof,
		Cache: cache.Options{
			DefaultTransform:  cache.TransformStripManagedFields(),
			DefaultNamespaces: map[string]cache.Config{namespace: {}},
		},
	})
	if err != nil {
		return err
	}
	if err := ipam.SetupWithManager(ctx, mgr, ipam.Options{Options: reconciling.Options{
		Concurrency: map[string]int{"IPAddressClaim": workers}, WatchNamespace: namespace,
	}}); err != nil {
		return err
	}
	go answer(count)
	return mgr.Start(ctx)
}

func answer(count *counter) {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		count.mu.Lock()
		count.s.RSS = rss()
		raw, err := json.Marshal(count.s)
		count.mu.Unlock()
		if err != nil {
			raw = []byte("{}")
		}
		fmt.Println(string(raw))
	}
	os.Exit(0) // The benchmark has ended.
}

func rss() uint64 {
	raw, err := os.ReadFile("/proc/self/statm")
	fields := strings.Fields(string(raw))
	if err != nil || len(fields) < 2 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.Sys
	}
	pages, _ := strconv.ParseUint(fields[1], 10, 64)
	return pages * uint64(os.Getpagesize())
}

// process is a running manager.
type process struct {
	cmd *exec.Cmd
	in  *bufio.Writer
	out *bufio.Scanner
}

func startProcess(kubeconfig string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, append([]string{"-manager", kubeconfig}, args...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // The manager ends with the benchmark.
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{cmd, bufio.NewWriter(in), bufio.NewScanner(out)}, cmd.Start()
}

func (p *process) stats() (stats, error) {
	var s stats
	if _, err := p.in.WriteString("stats\n"); err != nil {
		return s, err
	}
	if err := p.in.Flush(); err != nil {
		return s, err
	}
	if !p.out.Scan() {
		return s, errors.New("the manager has ended")
	}
	err := json.Unmarshal(p.out.Bytes(), &s)
	return s, err
}

func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}
