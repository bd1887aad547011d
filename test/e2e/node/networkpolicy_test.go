//go:build e2e

package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

const (
	denyServer = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: server}
spec:
  podSelector: {matchLabels: {app: server}}
  policyTypes: [Ingress]
`
	allowOther = denyServer + `
  ingress: [{from: [{podSelector: {matchLabels: {app: other}}}], ports: [{port: 8080}]}]
`
	allowAll = denyServer + `
  ingress: [{}]
`
	mappedToOther = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: mapped}
spec:
  podSelector: {matchLabels: {app: mapped}}
  policyTypes: [Egress]
  egress: [{to: [{podSelector: {matchLabels: {app: other}}}]}]
`
)

// testNetworkPolicies: policies apply between pods of one node and of two nodes, in both directions, also while their
// agent does not run. They end with their deletion.
func testNetworkPolicies(t *testing.T, cp, worker *host) {
	url := func(pod string) string {
		return "http://" + cp.mustKubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}") + ":8080/"
	}
	server, other := url("server"), url("other")
	get := func(pod, url string) error {
		_, err := cp.kubectl("exec", pod, "--", "/echo", "get", "-timeout", "2s", url)
		return err
	}
	refused := func(pod, url string) error {
		if get(pod, url) == nil {
			return errors.New(pod + " reaches " + url)
		}
		return nil
	}
	expect.NoError(t, errors.Join(get("other", server), get("mapped", server))) // After this, the policy is the cause of an error.

	cp.apply(denyServer)
	harness.Wait(t, "the policy refuses all pods", time.Minute, func() error { return errors.Join(refused("mapped", server), refused("other", server)) })
	expect.NoError(t, get("server", "http://front/")) // A pod reaches itself through a Service.

	agent := find(worker.until("ready", time.Minute, allReady), "node-agent")
	_, err := worker.exec("/bin/sh", "-c", fmt.Sprintf("kill -9 %d", agent.PID))
	expect.NoError(t, err)
	expect.NoError(t, refused("mapped", server))
	worker.until("the agent runs again", time.Minute, func(s initapi.Status) bool {
		now := find(s, "node-agent")
		return now.PID != 0 && now.PID != agent.PID
	})

	cp.apply(allowOther)
	harness.Wait(t, "the policy allows the pod other", time.Minute, func() error { return get("other", server) })
	expect.NoError(t, refused("mapped", server))

	cp.apply(allowAll)
	harness.Wait(t, "the policy allows all pods", time.Minute, func() error { return get("mapped", server) })
	cp.apply(mappedToOther)
	harness.Wait(t, "the policy refuses the pod mapped", time.Minute, func() error { return refused("mapped", server) })
	expect.NoError(t, errors.Join(get("mapped", other), get("other", server)))

	cp.mustKubectl("delete", "networkpolicy", "--all")
	harness.Wait(t, "the pod mapped reaches the server without policies", time.Minute, func() error { return get("mapped", server) })
	harness.Wait(t, "the worker has no rules of policies", time.Minute, func() error {
		if _, err := worker.exec("nft", "list", "table", "inet", "capstan-network-policy"); err == nil {
			return errors.New("the worker has rules although no policy exists")
		}
		return nil
	})
}
