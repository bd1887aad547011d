package pods

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// hook is a preStop hook, as the kubelet writes it into an annotation of the container.
type hook struct {
	Exec *struct {
		Command []string `json:"command"`
	} `json:"exec"`
	Sleep *struct {
		Seconds int64 `json:"seconds"`
	} `json:"sleep"`
	HTTPGet *httpGet `json:"httpGet"`
}

type httpGet struct {
	Scheme  string          `json:"scheme"`
	Host    string          `json:"host"`
	Port    json.RawMessage `json:"port"` // a number, or the name of a port of the container
	Path    string          `json:"path"`
	Headers []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"httpHeaders"`

	ports map[string]int
}

// hookOf reads the annotations of a container. Without a readable hook, the container stops without one.
func hookOf(preStop, ports string) (h hook) {
	if json.Unmarshal([]byte(preStop), &h) != nil {
		return hook{}
	}
	if h.HTTPGet != nil {
		var list []struct {
			Name          string `json:"name"`
			ContainerPort int    `json:"containerPort"`
		}
		_ = json.Unmarshal([]byte(ports), &list) // Without it, only numbers work.
		h.HTTPGet.ports = map[string]int{}
		for _, port := range list {
			h.HTTPGet.ports[port.Name] = port.ContainerPort
		}
	}
	return h
}

func (h hook) empty() bool { return h.Exec == nil && h.Sleep == nil && h.HTTPGet == nil }

// request returns the request of a hook to a pod with this address.
func (g *httpGet) request(ctx context.Context, podIP string) (*http.Request, error) {
	text := strings.Trim(string(g.Port), `"`)
	port, err := strconv.Atoi(text)
	if err != nil {
		port = g.ports[text]
	}
	if port < 1 || port > 65535 {
		return nil, fmt.Errorf("the container has no port %q", text)
	}
	path := "/" + strings.TrimPrefix(g.Path, "/")
	to := strings.ToLower(cmp.Or(g.Scheme, "http")) + "://" + net.JoinHostPort(cmp.Or(g.Host, podIP), strconv.Itoa(port)) + path
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, to, nil)
	if err != nil {
		return nil, err
	}
	for _, h := range g.Headers {
		r.Header.Add(h.Name, h.Value)
		if strings.EqualFold(h.Name, "Host") {
			r.Host = h.Value
		}
	}
	return r, nil
}

// preStop runs the hook of a container, at most for the grace period.
func (r *Runtime) preStop(ctx context.Context, c Container, grace time.Duration) error {
	if grace <= 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	switch hook := c.preStop; {
	case hook.Exec != nil:
		result, err := r.client.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: hook.Exec.Command, Timeout: seconds(grace)})
		if err == nil && result.ExitCode != 0 {
			err = fmt.Errorf("exit code %d", result.ExitCode)
		}
		return err
	case hook.HTTPGet != nil:
		return r.get(ctx, c)
	case hook.Sleep != nil:
		select {
		case <-ctx.Done():
		case <-time.After(atMost(hook.Sleep.Seconds)):
		}
	}
	return nil
}

// get sends the request of a hook. Like the kubelet, it accepts any certificate and any answer.
func (r *Runtime) get(ctx context.Context, c Container) error {
	sandbox, err := r.client.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: c.sandbox})
	if err != nil {
		return err
	}
	// A pod in the network of the machine has no address of its own.
	request, err := c.preStop.HTTPGet.request(ctx, cmp.Or(sandbox.GetStatus().GetNetwork().GetIp(), "127.0.0.1"))
	if err != nil {
		return err
	}
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, //nolint:gosec // as said
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}
