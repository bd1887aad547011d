//go:build e2e

// Package clusterctl contains end-to-end tests with the unmodified clusterctl: clusters from templates and from a
// ClusterClass, moves between management planes, and Capstan's providers as Deployments on a cluster of Capstan. It
// needs root and the built binaries.
package clusterctl

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/test/e2e/harness"
)

// The release that the tests build and use.
const version = "v0.1.0"

var (
	plane *harness.Plane
	// dist is the release's folder.
	dist string
)

func TestMain(m *testing.M) {
	os.Exit(func() int {
		folder, err := os.MkdirTemp("", "capdist")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(folder)
		dist = folder
		if err := release("manifests", version); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return harness.Run(m, &plane)
	}())
}

// release runs hack/release.sh.
func release(what, version string) error {
	script := filepath.Join(testenv.Root(), "hack", "release.sh")
	_, err := harness.Command(context.Background(), []string{"KUBECTL=" + harness.Kubectl()}, script, what, version, dist)
	return err
}

// clusterctl runs the real clusterctl with only the release's configuration.
func clusterctl(t *testing.T, environment []string, args ...string) (string, error) {
	t.Helper()
	home := t.TempDir()
	environment = append([]string{"HOME=" + home, "XDG_CONFIG_HOME=" + home, "CLUSTERCTL_DISABLE_VERSIONCHECK=true", "KUBECONFIG="}, environment...)
	return harness.Command(t.Context(), environment, filepath.Join(harness.Bin(), "clusterctl"),
		append(args, "--config", filepath.Join(dist, "clusterctl.yaml"))...)
}

// admin returns the kubeconfig of a plane's administrator.
func admin(p *harness.Plane) string { return filepath.Join(p.Root, "admin.kubeconfig") }

// kubectl runs kubectl against the cluster of a kubeconfig. input is its standard input, unless it is empty.
func kubectl(t *testing.T, kubeconfig, input string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Kubectl(), append([]string{"--kubeconfig", kubeconfig}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

func mustKubectl(t *testing.T, kubeconfig, input string, args ...string) string {
	t.Helper()
	out, err := kubectl(t, kubeconfig, input, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func mustClusterctl(t *testing.T, environment []string, args ...string) string {
	t.Helper()
	out, err := clusterctl(t, environment, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
