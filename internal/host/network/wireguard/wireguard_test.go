package wireguard

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"capstan.dev/capstan/internal/cidr"
)

func key(b byte) (k wgtypes.Key) {
	for i := range k {
		k[i] = b
	}
	return k
}

// A key stays the same, and only root can read it.
func TestEnsureKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wireguard.key")
	first, err := EnsureKey(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := EnsureKey(path); again != first || err != nil {
		t.Errorf("the key has changed: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, []byte(first.String()[:20]), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := EnsureKey(path); err == nil || strings.Contains(err.Error(), first.String()[:20]) || !strings.Contains(err.Error(), "restore the file") {
		t.Errorf("a damaged key: %v", err)
	}
}

// The address follows from the key, so no box can have that of another one.
func TestAddress(t *testing.T) {
	one, two := Address(key(1)), Address(key(2))
	if one == two || one != Address(key(1)) || !cidr.EncryptedLink.Contains(one) || !cidr.EncryptedLink.Contains(two) {
		t.Errorf("%s and %s", one, two)
	}
	if want := "fdca:9574:72cd:6e84:22c4:7fb:6d09:8690"; one.String() != want {
		t.Errorf("%s, want %s: boxes of different versions would not reach each other", one, want)
	}
}

// A change keeps the sessions of peers that stay, and allows each peer its own address only. The box with the smaller key starts the
// session and keeps it alive: the other box receives the address of a new peer later.
func TestChange(t *testing.T) {
	own := Link{Public: key(2)}
	peers := []Peer{
		{key(0), netip.MustParseAddr("192.0.2.3")}, {key(1), netip.MustParseAddr("192.0.2.1")}, {key(4), netip.MustParseAddr("2001:db8::2")},
	}
	c, later := own.change([]wgtypes.Key{key(1), key(3)}, peers, false)
	if c.ReplacePeers || c.PrivateKey != nil {
		t.Errorf("the change ends all sessions: %+v", c)
	}
	if got, want := text(later), "public_key="+strings.Repeat("00", 32)+"\nupdate_only=true\nendpoint=192.0.2.3:4787\n"; got != want {
		t.Errorf("later: got\n%s\nwant\n%s", got, want)
	}
	want := fmt.Sprintf(`public_key=%[6]s
persistent_keepalive_interval=0
replace_allowed_ips=true
allowed_ip=%[7]s/128
public_key=%[1]s
endpoint=192.0.2.1:4787
persistent_keepalive_interval=0
replace_allowed_ips=true
allowed_ip=%[4]s/128
public_key=%[2]s
endpoint=[2001:db8::2]:4787
persistent_keepalive_interval=25
replace_allowed_ips=true
allowed_ip=%[5]s/128
public_key=%[3]s
remove=true
`, strings.Repeat("01", 32), strings.Repeat("04", 32), strings.Repeat("03", 32), Address(key(1)), Address(key(4)),
		strings.Repeat("00", 32), Address(key(0)))
	if got := text(c); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	kept, _ := own.change([]wgtypes.Key{key(1), key(3)}, peers, true)
	if got := text(kept); strings.Contains(got, "remove") || !strings.HasPrefix(want, got) {
		t.Errorf("with all peers kept: got\n%s", got)
	}
}

func TestParsePublic(t *testing.T) {
	for text, good := range map[string]bool{
		key(1).String(): true, key(0).String(): false, "": false, "x": false, key(1).String() + "\n": false, key(1).String()[:43]: false,
		"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQF=": false, // other padding bits
	} {
		if _, err := ParsePublic(text); (err == nil) != good {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A device of the kernel without the key or the port of the link is one that capstand did not complete, or that of another program.
func TestOwns(t *testing.T) {
	own := Link{Public: key(2)}
	for name, test := range map[string]struct {
		have wgtypes.Device
		want bool
	}{
		"complete":                    {wgtypes.Device{PublicKey: key(2), ListenPort: Port}, true},
		"without a key":               {wgtypes.Device{ListenPort: Port}, false},
		"without a port":              {wgtypes.Device{PublicKey: key(2)}, false},
		"as the kernel creates it":    {wgtypes.Device{}, false},
		"the key of another program":  {wgtypes.Device{PublicKey: key(3), ListenPort: Port}, false},
		"the port of another program": {wgtypes.Device{PublicKey: key(2), ListenPort: 51820}, false},
	} {
		if got := own.owns(&test.have); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
