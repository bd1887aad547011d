package main

import (
	"os"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host"
	"capstan.dev/capstan/internal/logging"
	"capstan.dev/capstan/internal/testenv/testlogs"
)

// asCapstand makes this test program run capstand.
const asCapstand = "CAPSTAN_TEST_RUN_CAPSTAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCapstand) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// Each line of capstand and its subcommands is JSON, including the last one, with the cause of the end.
func TestLogsAreJSON(t *testing.T) {
	for _, args := range [][]string{
		{"hollow", "--versions=1.36.3", "--root=" + t.TempDir()},
		{"--reserve-memory=much", "--root=" + t.TempDir()},
		{"--nonsense"},
		{"hollow", "nonsense"},
	} {
		testlogs.EndsInJSON(t, testlogs.Failed(t, asCapstand, append([]string{"--logging-format=json"}, args...)...), "capstand ends")
	}
}

func TestWrongLogFormat(t *testing.T) {
	c := command()
	c.SetArgs([]string{"--logging-format=xml"})
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), `expected text or json, found "xml"`) {
		t.Errorf("found %v", err)
	}
}

// Folders and the socket are below the root unless flags say otherwise, and wrong values are refused with the name of their flag.
func TestParse(t *testing.T) {
	valid := func() options {
		return options{root: "/state", assets: "/assets", images: "/pictures", reserveMemory: "1Gi", reserveDisk: "2Gi", socketUID: 7, logs: logging.New()}
	}
	config, socket, err := valid().parse()
	if err != nil {
		t.Fatal(err)
	}
	if config.Root != "/state" || config.Assets != "/assets" || config.Backups != "/state/backups" || config.Images != "/pictures" || config.ContainerImages != "/state/container-images" {
		t.Errorf("folders: %+v", config)
	}
	if config.ReserveMemory != 1<<30 || config.ReserveDisk != 2<<30 || config.EncryptOverlays {
		t.Errorf("limits: %+v", config)
	}
	if want := (host.Socket{Path: "/state/capstand.sock", UID: 7, GID: -1}); socket != want {
		t.Errorf("socket: %+v, want %+v", socket, want)
	}
	for flag, change := range map[string]func(*options){
		"--reserve-memory":     func(o *options) { o.reserveMemory = "much" },
		"--reserve-disk":       func(o *options) { o.reserveDisk = "much" },
		"--stop-pods-within":   func(o *options) { o.stopPodsWithin = -1 },
		"--overlay-encryption": func(o *options) { o.overlayEncryption = "rot13" },
		"--socket-group":       func(o *options) { o.socketGroup = "no such group" },
	} {
		o := valid()
		change(&o)
		if _, _, err := o.parse(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
